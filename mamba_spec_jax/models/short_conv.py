"""The token mixer of short-convolution layers."""

import functools
from typing import cast

import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Hidden
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.attention.short_conv import ShortConvInputs, ShortConvWeights
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.mixers import Mixed
from mamba_spec_jax.models.recurrent_config import ShortConvConfig
from mamba_spec_jax.modes import DTypePolicy


class ShortConvMixer(nnx.Module):
    """One projection to B, C and x, then `out(C * conv(B * x))`."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        conv = cast(ShortConvConfig, config.recurrent)  # the configuration has checked it
        linear = functools.partial(
            Linear, use_bias=conv.bias, dtype=policy.activations, param_dtype=policy.params, rngs=rngs
        )
        C = conv.channels
        self.in_proj = linear(config.hidden_size, 3 * C)
        init = nnx.initializers.lecun_normal()
        self.conv_weight = nnx.Param(init(rngs.params(), (conv.conv_width, C), policy.params))
        self.conv_bias = nnx.Param(jnp.zeros((C,), policy.params)) if conv.bias else None
        self.out_proj = linear(C, config.hidden_size)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        into, out, x = jnp.split(self.in_proj(x), 3, axis=-1)
        weights = ShortConvWeights(self.conv_weight[...], None if self.conv_bias is None else self.conv_bias[...])
        mixed, cache, record = backend.forward(layer_id, ShortConvInputs(into * x, weights), cache, record, batch)
        return self.out_proj(out * mixed.reshape(out.shape)), cache, record
