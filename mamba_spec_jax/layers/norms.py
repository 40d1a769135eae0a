"""Root-mean-square norms, computed in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array
from pallas_kernels.arithmetic import alike

GATES: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


class RMSNorm(nnx.Module):
    """`weight * x / rms(x)` over the last axis (Zhang and Sennrich 2019).

    With `zero_centered` it is `(1 + weight) * x / rms(x)`, multiplied in float32.
    """

    def __init__(self, size: int, *, eps: float, zero_centered: bool = False, param_dtype):
        self.weight = nnx.Param((jnp.zeros if zero_centered else jnp.ones)((size,), param_dtype))
        self.eps = eps
        self.zero_centered = zero_centered

    def __call__(self, x: Array) -> Array:
        normed = _unit_rms(x.astype(jnp.float32), self.eps)
        weight = _over(x, self.weight)
        if self.zero_centered:
            return ((1 + weight.astype(jnp.float32)) * normed).astype(x.dtype)
        return weight.astype(x.dtype) * normed.astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """Mamba-2's norm: `weight * (x silu(z)) / rms(x silu(z))`, the rms taken within each of `groups` groups.

    With `before_gate` it is `weight * x / rms(x) * silu(z)`. The gate's activation is one of `GATES`.
    """

    def __init__(
        self, size: int, *, groups: int = 1, eps: float, before_gate: bool = False, gate: str = "silu", param_dtype
    ):
        if size % groups:
            raise ValueError(f"GatedRMSNorm of size {size} cannot be split into {groups} equal groups")
        self.weight = nnx.Param(jnp.ones((size,), param_dtype))
        self.groups = groups
        self.eps = eps
        self.before_gate = before_gate
        self.gate = gate

    def __call__(self, x: Array, gate: Array) -> Array:
        weight = _over(x, self.weight)
        if self.before_gate:
            normed = self._norm(x.astype(jnp.float32)) * weight.astype(jnp.float32)
            return (normed * self._activated(gate)).astype(x.dtype)
        gated = x.astype(jnp.float32) * self._activated(gate)
        return weight * self._norm(gated).astype(x.dtype)

    def _activated(self, gate: Array) -> Array:
        return alike(GATES[self.gate], gate.astype(jnp.float32))

    def _norm(self, x: Array) -> Array:
        return _unit_rms(x.reshape(*x.shape[:-1], self.groups, -1), self.eps).reshape(x.shape)


def apply_gate(x: Array, gate: Array) -> Array:
    """`x silu(z)`, for mixers without a norm."""
    return (x.astype(jnp.float32) * alike(jax.nn.silu, gate.astype(jnp.float32))).astype(x.dtype)


def _unit_rms(x: Array, eps: float) -> Array:
    return x * alike(jax.lax.rsqrt, jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _over(x: Array, weight: nnx.Param) -> Array:
    """A weight of x's last axis with as many axes as x has: a caller may forbid implicit broadcasting of ranks."""
    return jnp.expand_dims(weight[...], tuple(range(x.ndim - 1)))
