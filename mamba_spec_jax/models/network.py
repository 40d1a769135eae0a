"""The flax modules of a hybrid language model: its layers, and their stack between embedding and output projection."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Tokens
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.mlp import MLP, GatedMLP, SparseMoE
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear, matmul
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.gated_delta import GatedDeltaMixer
from mamba_spec_jax.models.latent_attention import LatentAttention
from mamba_spec_jax.models.mamba1 import Mamba1Mixer
from mamba_spec_jax.models.mixers import Attention, Mamba2Mixer, Mixed, ParallelMixer
from mamba_spec_jax.models.shared import SharedBlock, SharedUse
from mamba_spec_jax.models.short_conv import ShortConvMixer
from mamba_spec_jax.modes import DTypePolicy
from pallas_kernels.arithmetic import alike

_MIXERS = {
    "mamba": Mamba2Mixer,
    "gated_delta": GatedDeltaMixer,
    "mamba1": Mamba1Mixer,
    "short_conv": ShortConvMixer,
    "attention": Attention,
    "parallel": ParallelMixer,
    "shared": Mamba2Mixer,
}


class HybridLayer(nnx.Module):
    """A token mixer, a feed-forward part, or both, each after a norm, scaled and added to the residual stream."""

    def __init__(self, config: HybridConfig, layer_id: int, policy: DTypePolicy, rngs: nnx.Rngs):
        self.layer_id = layer_id
        self.residual_multiplier = config.residual_multiplier
        self.dtype = policy.activations
        kind, D = config.layer_types[layer_id], config.hidden_size
        mixes = kind in _MIXERS
        width, routes = config.dense_width(layer_id), config.has_experts(layer_id)
        dtypes: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        norm: dict[str, Any] = norm_options(config, policy)
        self.norms_output = kind == "attention" and config.attention_norms_output
        self.shared = SharedUse(config, layer_id, policy, rngs) if kind == "shared" else None
        self.input_norm: Any = RMSNorm(D, **norm) if mixes else None
        mixer: Any = LatentAttention if kind == "attention" and config.latent else _MIXERS.get(kind)
        self.mixer: Any = mixer(config, policy, rngs) if mixes else None
        self.mlp_norm: Any = RMSNorm(D, **norm) if width or routes else None
        self.shared_mlp: Any = _dense(config, width, dtypes) if width else None
        self.moe = (
            SparseMoE(
                D,
                config.expert_intermediate_size,
                config.num_experts,
                config.experts_per_token,
                gated=config.mlp_gated,
                activation=config.mlp_activation,
                routing=config.sigmoid_routing,
                over_chosen=config.softmax_over_chosen,
                latent=config.expert_latent_size,
                bias=config.mlp_bias,
                **dtypes,
            )
            if routes
            else None
        )
        gates_shared = config.shared_gated and width and routes
        self.shared_gate = Linear(D, 1, use_bias=False, **dtypes) if gates_shared else None

    def __call__(
        self, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch, heard: Hidden | None = None,
    ) -> Mixed:  # fmt: skip
        """`heard` is added to what the mixer reads, but not to the residual stream."""
        if self.mixer is not None:
            read = self._before(self.input_norm, x if heard is None else x + heard.astype(x.dtype))
            mixed, cache, record = self.mixer(self.layer_id, read, backend, cache, record, batch)
            x = x + self._after(self.input_norm, mixed).astype(x.dtype)
        if self.mlp_norm is not None:
            expanded = self._feed_forward(self._before(self.mlp_norm, x))
            x = x + self._after(self.mlp_norm, expanded).astype(x.dtype)
        return x, cache, record

    def _before(self, norm: RMSNorm, x: Hidden) -> Hidden:
        x = x.astype(self.dtype)
        return x if self.norms_output else norm(x)

    def _after(self, norm: RMSNorm, given: Hidden) -> Hidden:
        return (norm(given) if self.norms_output else given) * self.residual_multiplier

    def _feed_forward(self, normed: Hidden) -> Hidden:
        if self.moe is None:
            return self.shared_mlp(normed)
        if self.shared_mlp is None:
            return self.moe(normed)
        dense = self.shared_mlp(normed)
        if self.shared_gate is not None:
            dense = alike(jax.nn.sigmoid, self.shared_gate(normed)) * dense
        return self.moe(normed) + dense


class HybridLM(nnx.Module):
    """Embedding, layers, final norm and output projection; holds the weights and nothing else."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        self.config = config
        self.dtype = policy.activations
        dtypes: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, **dtypes)
        blocks = config.shared_blocks.count if config.shared_blocks else 0
        self.shared_blocks = nnx.List([SharedBlock(config, policy, rngs) for _ in range(blocks)])
        self.layers = nnx.List([HybridLayer(config, i, policy, rngs) for i in range(len(config.layer_types))])
        self.norm = RMSNorm(config.hidden_size, **norm_options(config, policy))
        self.lm_head = (
            None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, use_bias=False, **dtypes)
        )

    def __call__(
        self,
        tokens: Tokens,
        backend: AttentionBackend,
        cache: HybridCache,
        batch: ForwardBatch,
        hidden_layers: tuple[int, ...] = (),
    ) -> tuple[Hidden, HybridCache, VerifyRecord | None, tuple[Hidden, ...]]:
        """The final hidden states, the cache, the record, and the outputs of `hidden_layers`."""
        embedded = self.embed_tokens(tokens) * self.config.embedding_multiplier
        record = backend.init_record(batch)
        x = embedded.astype(jnp.float32) if self.config.residual_in_fp32 else embedded
        kept = {}
        for layer_id, layer in enumerate(self.layers):
            heard = None
            if layer.shared is not None:
                block = self.shared_blocks[layer.shared.block]
                heard, cache, record = block(layer.shared, x, embedded, backend, cache, record, batch)
            x, cache, record = layer(x, backend, cache, record, batch, heard)
            if layer_id in hidden_layers:
                kept[layer_id] = x
        return self.norm(x).astype(self.dtype), cache, record, tuple(kept[i] for i in hidden_layers)

    def logits(self, x: Array) -> Array:
        """`[..., V]` float32 from final hidden states `[..., D]`."""
        weight = self.embed_tokens.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        product = matmul(x, weight.astype(x.dtype), dtype=jnp.float32)
        return product / self.config.logits_divisor


def abstract_split(config: HybridConfig, policy: DTypePolicy) -> tuple[Any, Any]:
    """Graph definition and abstract weights of `HybridLM`, allocating nothing."""
    # Only shapes matter, so one key serves all: a stream that counts its keys makes tracing quadratic in the layers.
    rngs: Any = types.SimpleNamespace(params=lambda: jax.random.key(0))
    return nnx.split(nnx.eval_shape(lambda: HybridLM(config, policy, rngs)))


def require_params(caller: str, config: HybridConfig, policy: DTypePolicy, params: Any) -> None:
    """Raises ValueError (while tracing) unless `params` has the weights of the model, by name and shape."""
    expected, came = _expected_shapes(config, policy), _shapes(params)
    problems = [
        f"{name} is {came.get(name, 'missing')}, expected {expected.get(name, 'no such weight')}"
        for name in dict.fromkeys([*expected, *came])
        if expected.get(name) != came.get(name)
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{caller} got params of type {type(params).__name__} that are not this model's: "
            f"{'; '.join(problems[:3])}{more}. Pass what load or init_params of the same configuration returned"
        )


@functools.lru_cache(maxsize=32)
def _expected_shapes(config: HybridConfig, policy: DTypePolicy) -> dict[str, list[int]]:
    return _shapes(abstract_split(config, policy)[1])


def _shapes(params: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): list(np.shape(leaf)) for path, leaf in leaves}


def norm_options(config: HybridConfig, policy: DTypePolicy) -> dict[str, Any]:
    """Options of every `RMSNorm` of a model that is a layer's own."""
    return {"eps": config.norm_eps, "zero_centered": config.zero_centered_norms, "param_dtype": policy.params}


def _dense(config: HybridConfig, width: int, dtypes: dict[str, Any]) -> MLP | GatedMLP:
    common: dict[str, Any] = {"activation": config.mlp_activation, "bias": config.mlp_bias} | dtypes
    if not config.mlp_gated:
        return MLP(config.hidden_size, width, **common)
    scales = config.multipliers
    return GatedMLP(config.hidden_size, width, gate_multiplier=scales.mlp_gate, multiplier=scales.mlp_out, **common)
