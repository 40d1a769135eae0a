"""Zamba2's shared transformer blocks: weights that several layers use in turn, and each layer's adapters."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Hidden
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.mlp import GatedMLP
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear, LowRank
from mamba_spec_jax.models.config import HybridConfig, SharedBlocks
from mamba_spec_jax.models.mixers import Attention, Mixed
from mamba_spec_jax.modes import DTypePolicy


class SharedUse(nnx.Module):
    """One layer's use of a shared block: which block, low-rank additions to its projections, and a projection out."""

    def __init__(self, config: HybridConfig, layer_id: int, policy: DTypePolicy, rngs: nnx.Rngs):
        self.layer_id = layer_id
        shared: SharedBlocks = config.shared_blocks  # type: ignore[assignment]  # checked by the configuration
        self.block = config.layer_types[:layer_id].count("shared") % shared.count
        D = config.hidden_size
        dtypes: dict[str, Any] = {"dtype": policy.activations, "param_dtype": policy.params, "rngs": rngs}
        adapter: Any = functools.partial(LowRank, rank=shared.adapter_rank, **dtypes)
        sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.attention_adapters = nnx.List(
            [adapter(2 * D, heads * config.head_dim) for heads in sizes] if shared.adapts_attention else [None] * 3
        )
        self.mlp_adapter = adapter(D, 2 * config.shared_intermediate_size)
        self.linear = Linear(D, D, use_bias=False, **dtypes)


class SharedBlock(nnx.Module):
    """Attention over `[x, embedding]` and a gated feed-forward part, each after a norm, without a residual stream."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        D = config.hidden_size
        norm = functools.partial(RMSNorm, eps=config.norm_eps, param_dtype=policy.params)
        self.input_norm = norm(2 * D)
        self.attention = Attention(config, policy, rngs, input_size=2 * D)
        self.mlp_norm = norm(D)
        self.mlp = GatedMLP(
            D,
            config.shared_intermediate_size,
            activation=config.mlp_activation,
            bias=config.mlp_bias,
            dtype=policy.activations,
            param_dtype=policy.params,
            rngs=rngs,
        )

    def __call__(
        self, use: SharedUse, x: Hidden, embedded: Hidden, backend: AttentionBackend, cache: HybridCache,
        record: VerifyRecord | None, batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        """The block's output for the layer of `use`, from the residual stream `x` and the embeddings."""
        both = self.input_norm(jnp.concatenate([x.astype(embedded.dtype), embedded], axis=-1))
        adapters = tuple(use.attention_adapters)
        mixed, cache, record = self.attention(use.layer_id, both, backend, cache, record, batch, adapters)
        return use.linear(self.mlp(self.mlp_norm(mixed), use.mlp_adapter)), cache, record
