"""The token mixer of Mamba-1 layers, with the norms of its parameters that Jamba has."""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden
from mamba_spec_jax.attention.base import AttentionBackend, ForwardBatch
from mamba_spec_jax.attention.mamba1 import Mamba1Inputs, Mamba1Weights
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import VerifyRecord
from mamba_spec_jax.layers.norms import RMSNorm, apply_gate
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.mixers import Mixed
from mamba_spec_jax.models.recurrent_config import Mamba1Config
from mamba_spec_jax.modes import DTypePolicy
from pallas_kernels.arithmetic import alike


class Mamba1Mixer(nnx.Module):
    """One projection to x and gate, convolution, a projection to dt, B and C, recurrence, one projection out."""

    def __init__(self, config: HybridConfig, policy: DTypePolicy, rngs: nnx.Rngs):
        mamba = cast(Mamba1Config, config.recurrent)  # the configuration has checked it
        C, N, R = mamba.channels, mamba.state, mamba.rank
        self.ends = (R, R + N)
        linear = functools.partial(Linear, dtype=policy.activations, param_dtype=policy.params, rngs=rngs)
        norm = functools.partial(RMSNorm, eps=config.norm_eps, param_dtype=policy.params)
        self.in_proj = linear(config.hidden_size, 2 * C, use_bias=mamba.proj_bias)
        init = nnx.initializers.lecun_normal()
        self.conv_weight = nnx.Param(init(rngs.params(), (mamba.conv_width, C), policy.params))
        self.conv_bias = nnx.Param(jnp.zeros((C,), policy.params)) if mamba.conv_bias else None
        self.x_proj = linear(C, R + 2 * N, use_bias=False)
        self.dt_norm, self.B_norm, self.C_norm = norm(R), norm(N), norm(N)
        self.dt_proj = linear(R, C, use_bias=False)
        self.dt_bias = nnx.Param(jnp.ones((C,), policy.params))
        A = jnp.broadcast_to(jnp.arange(1, N + 1, dtype=jnp.float32), (C, N))
        self.A_log = nnx.Param(jnp.log(A).astype(policy.params))
        self.D = nnx.Param(jnp.ones((C,), policy.params))
        self.out_proj = linear(C, config.hidden_size, use_bias=mamba.proj_bias)

    def __call__(
        self, layer_id: int, x: Hidden, backend: AttentionBackend, cache: HybridCache, record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> Mixed:  # fmt: skip
        x, gate = jnp.split(self.in_proj(x), 2, axis=-1)
        weights = Mamba1Weights(
            conv_weight=self.conv_weight[...],
            conv_bias=None if self.conv_bias is None else self.conv_bias[...],
            A_log=self.A_log[...],
            D=self.D[...],
        )
        inputs = Mamba1Inputs(x, weights, self._parameters)
        mixed, cache, record = backend.forward(layer_id, inputs, cache, record, batch)
        return self.out_proj(apply_gate(mixed.reshape(gate.shape), gate)), cache, record

    def _parameters(self, mixed: Array) -> tuple[Array, Array, Array]:
        dt, B, C = jnp.split(self.x_proj(mixed), self.ends, axis=-1)
        dt = self.dt_proj(self.dt_norm(dt)).astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32)[None, None]
        return alike(jax.nn.softplus, dt), self.B_norm(B), self.C_norm(C)
