"""Rotary position embedding (Su et al. 2021), in the half-split layout of Llama-like checkpoints."""

import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Tokens
from mamba_spec_jax.layers.rotary_scaling import RotaryScaling, plain_frequencies
from pallas_kernels.arithmetic import alike


def apply_rotary(
    x: Float[Array, "B T H Dh"],
    positions: Tokens,
    theta: float,
    dim: int | None = None,
    scaling: RotaryScaling | None = None,
) -> Float[Array, "B T H Dh"]:
    """Rotates the pair (i, i + d/2) of every head by `position * frequency[i]`, which is `theta^(-2i/d)` unscaled.

    What comes out depends on a token's own position, never on the window that it is read in.

    Args:
        x: queries or keys.
        positions: `[B, T]` absolute.
        theta: base of the frequencies.
        dim: d, leading dims of a head that are rotated; None for all Dh.
        scaling: gives other frequencies, and may multiply what is rotated by a constant.
    """
    if dim is not None and dim < x.shape[-1]:
        return jnp.concatenate([apply_rotary(x[..., :dim], positions, theta, None, scaling), x[..., dim:]], axis=-1)
    half = x.shape[-1] // 2
    frequencies = plain_frequencies(theta, 2 * half) if scaling is None else scaling.frequencies(theta, 2 * half)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None]
    cos, sin = alike(jnp.cos, angles), alike(jnp.sin, angles)
    if scaling is not None and scaling.magnitude != 1:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    rotated = jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return x * cos.astype(x.dtype) + rotated * sin.astype(x.dtype)
