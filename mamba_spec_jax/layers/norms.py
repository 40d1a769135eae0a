"""Root-mean-square norms, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array


class RMSNorm(nnx.Module):
    """`weight * x / rms(x)` over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float, param_dtype):
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        normed = _unit_rms(x.astype(jnp.float32), self.eps)
        return self.weight[...].astype(x.dtype) * normed.astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """Mamba-2's norm: `weight * (x silu(z)) / rms(x silu(z))`, the rms taken within each of `groups` groups.

    With `before_gate` it is `weight * x / rms(x) * silu(z)`.
    """

    def __init__(self, size: int, *, groups: int, eps: float, before_gate: bool = False, param_dtype):
        if size % groups:
            raise ValueError(f"GatedRMSNorm of size {size} cannot be split into {groups} equal groups")
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.groups = groups
        self.eps = eps
        self.before_gate = before_gate

    def __call__(self, x: Array, gate: Array) -> Array:
        if self.before_gate:
            normed = self._norm(x.astype(jnp.float32)) * self.weight[...].astype(jnp.float32)
            return (normed * _silu(gate)).astype(x.dtype)
        gated = x.astype(jnp.float32) * _silu(gate)
        return self.weight[...] * self._norm(gated).astype(x.dtype)

    def _norm(self, x: Array) -> Array:
        return _unit_rms(x.reshape(*x.shape[:-1], self.groups, -1), self.eps).reshape(x.shape)


def apply_gate(x: Array, gate: Array) -> Array:
    """`x silu(z)`, for mixers without a norm."""
    return (x.astype(jnp.float32) * _silu(gate)).astype(x.dtype)


def _silu(gate: Array) -> Array:
    return jax.nn.silu(gate.astype(jnp.float32))


def _unit_rms(x: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
