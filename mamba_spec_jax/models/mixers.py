"""The token mixers of a hybrid layer: projections around what the backend computes over the cache."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden
from mamba_spec_jax.attention.base import AttentionBackend, AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.mamba2 import Mamba2Inputs, Mamba2Weights
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.norms import GatedRMSNorm, RMSNorm, apply_gate
from mamba_spec_jax.layers.projections import Linear, LowRank, scaled
from mamba_spec_jax.layers.rotary import apply_rotary
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config
from mamba_spec_jax.modes import DTypePolicy
from pallas_kernels.arithmetic import alike

Mixed = tuple[Hidden, HybridCache, VerifyRecord | None]


class Attention(nnx.Module):
    """Full attention with grouped queries; reads D dims, or `input_size`.

    Gated attention (Qwen3-Next) projects to twice as many queries, of which every head's second half gates what it
    gives.
    """

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs, input_size: int | None = None):
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.rotary_dim = config.rotary_dim
        self.rope_scaling = config.rope_scaling
        self.in_multiplier = config.multipliers.attention_in
        self.out_multiplier = config.multipliers.attention_out
        linear = functools.partial(
            Linear, use_bias=config.attention_bias, dtype=policy.activations, param_dtype=policy.params, rngs=rngs
        )
        size = input_size or config.hidden_size
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.gated = config.attention_gated
        self.q_proj = linear(size, (1 + self.gated) * query_size)
        self.k_proj = linear(size, kv_size)
        self.v_proj = linear(size, kv_size)
        self.o_proj = linear(query_size, config.hidden_size)
        self.norms_heads = config.attention_norm == "head"
        norm = functools.partial(
            RMSNorm, eps=config.norm_eps, zero_centered=config.zero_centered_norms, param_dtype=policy.params
        )
        widths = (self.head_dim, self.head_dim) if self.norms_heads else (query_size, kv_size)
        self.q_norm, self.k_norm = (None if config.attention_norm == "none" else norm(width) for width in widths)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch, adapters: tuple[LowRank | None, ...] = (None, None, None),
    ) -> Mixed:  # fmt: skip
        """`adapters` add to queries, keys and values: a layer's own part in weights that it shares."""
        x = scaled(x, self.in_multiplier)
        query, key, value = (
            projection(x) if adapter is None else projection(x) + adapter(x)
            for projection, adapter in zip((self.q_proj, self.k_proj, self.v_proj), adapters, strict=True)
        )
        gate = None
        if self.gated:
            query, gate = jnp.split(query.reshape(*x.shape[:2], -1, 2 * self.head_dim), 2, axis=-1)
        query, key = self._heads(query, self.q_norm), self._heads(key, self.k_norm)
        value = self._heads(value, None)
        if self.rope_theta is not None:
            rotation = (batch.positions, self.rope_theta, self.rotary_dim, self.rope_scaling)
            query, key = apply_rotary(query, *rotation), apply_rotary(key, *rotation)
        mixed, cache, record = backend.forward(layer_id, AttentionInputs(query, key, value), cache, record, batch)
        if gate is not None:
            mixed = mixed * alike(jax.nn.sigmoid, gate)
        return scaled(self.o_proj(mixed.reshape(*x.shape[:2], -1)), self.out_multiplier), cache, record

    def _heads(self, x: Array, norm: RMSNorm | None) -> Array:
        if norm is not None and not self.norms_heads:
            x = norm(x)
        x = x.reshape(*x.shape[:2], -1, self.head_dim)
        return norm(x) if norm is not None and self.norms_heads else x


class Mamba2Mixer(nnx.Module):
    """Mamba-2: one projection in, convolution and recurrence in the backend, gated norm, one projection out."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        mamba = cast(Mamba2Config, config.recurrent)  # the configuration has checked it
        self.inner = mamba.inner
        self.conv_channels = mamba.conv_channels
        self.multipliers = config.multipliers
        linear = functools.partial(Linear, dtype=policy.activations, param_dtype=policy.params, rngs=rngs)
        H, C = mamba.heads, mamba.conv_channels
        BC = mamba.groups * mamba.state
        self.parts = (self.inner, self.inner, BC, BC, H)  # z, x, B, C, dt
        self.in_proj = linear(config.hidden_size, self.inner + C + H, use_bias=mamba.proj_bias)
        self.out_proj = linear(self.inner, config.hidden_size, use_bias=mamba.out_bias)
        init = nnx.initializers.lecun_normal()
        self.conv_weight = nnx.Param(init(rngs.params(), (mamba.conv_width, C), policy.params))
        self.conv_bias = nnx.Param(jnp.zeros((C,), policy.params)) if mamba.conv_bias else None
        self.dt_bias = nnx.Param(jnp.ones((H,), policy.params))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, H + 1, dtype=jnp.float32)).astype(policy.params))
        self.D = nnx.Param(jnp.ones((H,), policy.params))
        self.norm = (
            GatedRMSNorm(
                self.inner,
                groups=mamba.groups,
                eps=config.norm_eps if mamba.norm_eps is None else mamba.norm_eps,
                before_gate=mamba.norm == "before_gate",
                param_dtype=policy.params,
            )
            if mamba.norm != "none"
            else None
        )

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        projected = self._scale_parts(self.in_proj(scaled(x, self.multipliers.ssm_in)))
        gate, xBC, dt = jnp.split(projected, [self.inner, self.inner + self.conv_channels], axis=-1)
        weights = Mamba2Weights(
            conv_weight=self.conv_weight[...],
            conv_bias=None if self.conv_bias is None else self.conv_bias[...],
            dt_bias=self.dt_bias[...],
            A_log=self.A_log[...],
            D=self.D[...],
        )
        mixed, cache, record = backend.forward(layer_id, Mamba2Inputs(xBC, dt, weights), cache, record, batch)
        mixed = mixed.reshape(gate.shape)
        gated = apply_gate(mixed, gate) if self.norm is None else self.norm(mixed, gate)
        return scaled(self.out_proj(gated), self.multipliers.ssm_out), cache, record

    def _scale_parts(self, projected: Array) -> Array:
        if all(multiplier == 1 for multiplier in self.multipliers.ssm):
            return projected
        return projected * jnp.asarray(np.repeat(self.multipliers.ssm, self.parts), projected.dtype)[None, None]


class ParallelMixer(nnx.Module):
    """Attention and Mamba-2 on the same input, summed (Falcon-H1; Zuo et al. 2025)."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        self.attention = Attention(config, policy, rngs)
        self.mamba = Mamba2Mixer(config, policy, rngs)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        recurred, cache, record = self.mamba(layer_id, x, backend, cache, record, batch)
        attended, cache, record = self.attention(layer_id, x, backend, cache, record, batch)
        return recurred + attended, cache, record
