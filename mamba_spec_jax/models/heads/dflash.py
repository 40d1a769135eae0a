"""DFlash (2026): a block-diffusion head, which fills a whole block of masked positions in one pass.

Every layer attends from the block to itself, in both directions, and to what the target has read, whose hidden states
are projected to that layer's keys and values.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Tokens
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear, matmul
from mamba_spec_jax.models.heads.blocks import MLP, Attend, SelfAttention
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.modes import DTypePolicy


class BlockLayer(nnx.Module):
    """An ordinary pre-norm layer; queries and keys are normed per head."""

    def __init__(self, config: HeadConfig, **options: Any):
        D, eps, param_dtype = config.hidden_size, config.norm_eps, options["param_dtype"]
        self.input_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.self_attn = SelfAttention(config, D, head_norms=True, **options)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, param_dtype=param_dtype)
        self.mlp = MLP(D, config.intermediate_size, **options)

    def __call__(self, x: Hidden, positions: Tokens, attend: Attend) -> Hidden:
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nnx.Module):
    """The head's weights; embedding and output projection are the target's."""

    def __init__(self, config: HeadConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        D = config.hidden_size
        self.config = config
        self.fc = Linear(len(config.target_layers) * D, D, use_bias=False, **options)
        self.hidden_norm = RMSNorm(D, eps=config.norm_eps, param_dtype=policy.params)
        self.layers = nnx.List([BlockLayer(config, **options) for _ in range(config.num_layers)])
        self.norm = RMSNorm(D, eps=config.norm_eps, param_dtype=policy.params)

    def features(self, hidden: tuple[Hidden, ...]) -> Hidden:
        """`[B, T, D]` what every layer reads of the target."""
        return self.hidden_norm(self.fc(jnp.concatenate(hidden, axis=-1)))

    def logits(self, hidden: Hidden, output: Array) -> Array:
        product = matmul(self.norm(hidden), output, dtype=jnp.float32)
        return product / self.config.logits_divisor
