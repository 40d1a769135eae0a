"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama-like checkpoints."""

import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Tokens
from pallas_kernels.arithmetic import alike


def apply_rotary(
    x: Float[Array, "B T H Dh"], positions: Tokens, theta: float, dim: int | None = None
) -> Float[Array, "B T H Dh"]:
    """Rotates the pair (i, i + d/2) of every head by `position * theta^(-2i/d)`; d is `dim`, or Dh where it is None."""
    if dim is not None and dim < x.shape[-1]:
        return jnp.concatenate([apply_rotary(x[..., :dim], positions, theta), x[..., dim:]], axis=-1)
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None]
    rotated = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * alike(jnp.cos, angles).astype(x.dtype) + rotated * alike(jnp.sin, angles).astype(x.dtype)
