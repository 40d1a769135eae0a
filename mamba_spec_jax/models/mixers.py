"""The token mixers of a hybrid layer: projections around what the backend computes over the cache."""

import functools

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Hidden
from mamba_spec_jax.attention.base import AttentionBackend, AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.mamba2 import Mamba2Inputs, Mamba2Weights
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.norms import GatedRMSNorm
from mamba_spec_jax.layers.rotary import apply_rotary
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.modes import DTypePolicy

Mixed = tuple[Hidden, HybridCache, VerifyRecord | None]


class Attention(nnx.Module):
    """Full attention with grouped queries."""

    def __init__(self, config: HybridConfig, layer_id: int, policy: DTypePolicy, rngs: nnx.Rngs):
        self.layer_id = layer_id
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        linear = functools.partial(
            nnx.Linear, use_bias=config.attention_bias, dtype=policy.activations, param_dtype=policy.params, rngs=rngs
        )
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, query_size)
        self.k_proj = linear(config.hidden_size, kv_size)
        self.v_proj = linear(config.hidden_size, kv_size)
        self.o_proj = linear(query_size, config.hidden_size)

    def __call__(
        self, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None, batch: ForwardBatch
    ) -> Mixed:
        query, key, value = (
            projection(x).reshape(*x.shape[:2], -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rope_theta is not None:
            query = apply_rotary(query, batch.positions, self.rope_theta)
            key = apply_rotary(key, batch.positions, self.rope_theta)
        mixed, cache, record = backend.forward(self.layer_id, AttentionInputs(query, key, value), cache, record, batch)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), cache, record


class Mamba2Mixer(nnx.Module):
    """Mamba-2: one projection in, convolution and recurrence in the backend, gated norm, one projection out."""

    def __init__(self, config: HybridConfig, layer_id: int, policy: DTypePolicy, rngs: nnx.Rngs):
        self.layer_id = layer_id
        self.inner = config.mamba_inner
        self.conv_channels = config.conv_channels
        linear = functools.partial(
            nnx.Linear, use_bias=config.mamba_proj_bias, dtype=policy.activations, param_dtype=policy.params, rngs=rngs
        )
        H, C = config.mamba_heads, config.conv_channels
        self.in_proj = linear(config.hidden_size, self.inner + C + H)
        self.out_proj = linear(self.inner, config.hidden_size)
        init = nnx.initializers.lecun_normal()
        self.conv_weight = nnx.Param(init(rngs.params(), (config.mamba_conv_width, C), policy.params))
        self.conv_bias = nnx.Param(jnp.zeros((C,), policy.params)) if config.mamba_conv_bias else None
        self.dt_bias = nnx.Param(jnp.ones((H,), policy.params))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, H + 1, dtype=jnp.float32)).astype(policy.params))
        self.D = nnx.Param(jnp.ones((H,), policy.params))
        self.norm = GatedRMSNorm(self.inner, groups=config.mamba_groups, eps=config.norm_eps, param_dtype=policy.params)

    def __call__(
        self, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None, batch: ForwardBatch
    ) -> Mixed:
        gate, xBC, dt = jnp.split(self.in_proj(x), [self.inner, self.inner + self.conv_channels], axis=-1)
        weights = Mamba2Weights(
            conv_weight=self.conv_weight[...],
            conv_bias=None if self.conv_bias is None else self.conv_bias[...],
            dt_bias=self.dt_bias[...],
            A_log=self.A_log[...],
            D=self.D[...],
        )
        mixed, cache, record = backend.forward(self.layer_id, Mamba2Inputs(xBC, dt, weights), cache, record, batch)
        return self.out_proj(self.norm(mixed.reshape(gate.shape), gate)), cache, record
