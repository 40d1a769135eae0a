"""The token mixer of gated delta rule layers: projections, and the gated norm of what the recurrence gives."""

import functools
from typing import cast

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Hidden
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.attention.gated_delta import GatedDeltaInputs, GatedDeltaWeights
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.norms import GatedRMSNorm
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.mixers import Mixed
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig
from mamba_spec_jax.modes import DTypePolicy


class GatedDeltaMixer(nnx.Module):
    """One projection to queries, keys, values, output gate z, b and a; recurrence; a gated norm of every head.

    In KDA z and a come out of that projection with `rank` dims each, and each has a second projection.
    """

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        delta = cast(GatedDeltaConfig, config.recurrent)  # the configuration has checked it
        self.config = delta
        H, C = delta.heads, delta.conv_channels
        linear = functools.partial(
            Linear, use_bias=False, dtype=policy.activations, param_dtype=policy.params, rngs=rngs
        )
        widths = (C, delta.rank, H, delta.rank) if delta.rank else (C, delta.inner, H, H)  # qkv, z, b, a
        self.ends = tuple(sum(widths[:n]) for n in (1, 2, 3))
        self.in_proj = linear(config.hidden_size, sum(widths))
        self.gate_proj = linear(delta.rank, delta.inner) if delta.rank else None
        self.decay_proj = linear(delta.rank, H * delta.state) if delta.rank else None
        init = nnx.initializers.lecun_normal()
        self.conv_weight = nnx.Param(init(rngs.params(), (delta.conv_width, C), policy.params))
        self.dt_bias = nnx.Param(jnp.ones((H * delta.state if delta.rank else H,), policy.params))
        self.A_log = nnx.Param(jnp.log(jnp.arange(1, H + 1, dtype=jnp.float32)).astype(policy.params))
        self.norm = GatedRMSNorm(
            delta.head_dim,
            eps=config.norm_eps if delta.norm_eps is None else delta.norm_eps,
            before_gate=True,
            gate=delta.gate,
            param_dtype=policy.params,
        )
        self.out_proj = linear(delta.inner, config.hidden_size)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        qkv, z, b, a = jnp.split(self.in_proj(x), self.ends, axis=-1)
        dt_bias = self.dt_bias[...]
        if self.gate_proj is not None and self.decay_proj is not None:
            per_channel = (self.config.heads, self.config.state)
            z, a = self.gate_proj(z), self.decay_proj(a).reshape(*x.shape[:2], *per_channel)
            dt_bias = dt_bias.reshape(per_channel)
        weights = GatedDeltaWeights(conv_weight=self.conv_weight[...], dt_bias=dt_bias, A_log=self.A_log[...])
        mixed, cache, record = backend.forward(layer_id, GatedDeltaInputs(qkv, a, b, weights), cache, record, batch)
        normed = self.norm(mixed, z.reshape(mixed.shape))
        return self.out_proj(normed.reshape(z.shape)), cache, record
