"""Autoregressive draft heads: EAGLE-3 (Li et al. 2025), and multi-token prediction (DeepSeek-AI 2024, section 2.2).

Both read, at each position, the embedding of the newest token and a hidden state from the position before: the
target's where it has read the text, the head's own further on.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Tokens
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear, matmul
from mamba_spec_jax.models.heads.blocks import MLP, Attend, SelfAttention, join
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.modes import DTypePolicy


class EagleLayer(nnx.Module):
    """EAGLE-3's decoder layer: token and hidden state are normed apart, and attention reads both side by side."""

    def __init__(self, config: HeadConfig, **options: Any):
        D, eps, param_dtype = config.hidden_size, config.norm_eps, options["param_dtype"]
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.hidden_norm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.self_attn = SelfAttention(config, 2 * D, head_norms=False, **options)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.mlp = MLP(D, config.intermediate_size, **options)

    def __call__(self, embedded: Hidden, hidden: Hidden, positions: Tokens, attend: Attend) -> Hidden:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = residual + self.self_attn(join(self.input_layernorm(embedded), normed), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class PredictionLayer(nnx.Module):
    """A multi-token-prediction module: token and hidden state, normed, are projected into one ordinary layer."""

    def __init__(self, config: HeadConfig, **options: Any):
        D, eps, param_dtype = config.hidden_size, config.norm_eps, options["param_dtype"]
        self.pre_fc_norm_embedding = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.pre_fc_norm_hidden = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.fc = Linear(2 * D, D, use_bias=False, **options)
        self.input_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.self_attn = SelfAttention(config, D, head_norms=False, **options)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.mlp = MLP(D, config.intermediate_size, **options)

    def __call__(self, embedded: Hidden, hidden: Hidden, positions: Tokens, attend: Attend) -> Hidden:
        x = self.fc(join(self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)))
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nnx.Module):
    """One layer that reads three of the target's, with its own output projection onto part of the vocabulary.

    Draft token i is the target's token `i + d2t[i]`; `t2d` says which of the target's tokens have one.
    """

    def __init__(self, config: HeadConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        if config.num_layers != 1:
            raise ValueError(f"an EAGLE-3 head has one layer, but its configuration says {config.num_layers}")
        D, drafted = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.fc = Linear(len(config.target_layers) * D, D, use_bias=False, **options)
        self.midlayer = EagleLayer(config, **options)
        self.norm = RMSNorm(D, eps=config.norm_eps, param_dtype=policy.params)
        self.lm_head = Linear(D, drafted, use_bias=False, **options)
        self.d2t = nnx.Variable(jnp.zeros((drafted,), jnp.int32))
        self.t2d = nnx.Variable(jnp.arange(config.vocab_size, dtype=jnp.int32) < drafted)

    def features(self, hidden: tuple[Hidden, ...]) -> Hidden:
        return self.fc(jnp.concatenate(hidden, axis=-1))

    def layer(self, index: int) -> EagleLayer:
        return self.midlayer

    def logits(self, hidden: Hidden, output: Array) -> Array:
        drafted = self.lm_head(self.norm(hidden)).astype(jnp.float32)
        tokens = jnp.arange(drafted.shape[-1], dtype=jnp.int32) + self.d2t[...]
        everywhere = jnp.full((*drafted.shape[:-1], self.t2d.shape[0]), -jnp.inf, jnp.float32)
        return everywhere.at[..., tokens].set(drafted)


class MultiTokenPrediction(nnx.Module):
    """A layer for each token ahead, on the target's last hidden state and with the target's output projection."""

    def __init__(self, config: HeadConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        if len(config.target_layers) != 1:
            raise ValueError(
                f"multi-token prediction reads one layer of the target, but its configuration names "
                f"{config.target_layers}"
            )
        self.config = config
        self.layers = nnx.List([PredictionLayer(config, **options) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, param_dtype=policy.params)

    def features(self, hidden: tuple[Hidden, ...]) -> Hidden:
        return hidden[0]

    def layer(self, index: int) -> PredictionLayer:
        return self.layers[index]

    def logits(self, hidden: Hidden, output: Array) -> Array:
        product = matmul(self.norm(hidden), output, dtype=jnp.float32)
        return product / self.config.logits_divisor
