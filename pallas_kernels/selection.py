"""How a sum over the tokens of a window leaves out what a token does not see: it selects, and never multiplies by 0.

0 times NaN or infinity is NaN. A product over all tokens with weights of 0 would therefore carry what a later token, or
one on another branch of a tree, has computed into tokens that do not descend from it. So numbers that are not finite
are replaced by 0 before such a product, and every token that sees one of them is NaN after it.
"""

import jax
import jax.numpy as jnp


def finite(values: jax.Array) -> jax.Array:
    """The values, 0 in the place of those that are not finite."""
    return jnp.where(is_finite(values), values, jnp.zeros_like(values))


def is_finite(values: jax.Array) -> jax.Array:
    """Where a floating value is neither NaN nor infinite; a comparison, which every kernel's backend has."""
    return jnp.abs(values) <= jnp.finfo(values.dtype).max


def some(flags: jax.Array, axis: int) -> jax.Array:
    """`jnp.any`, as a maximum: Pallas lowers no reduction of booleans for Triton."""
    return jnp.max(jnp.where(flags, jnp.float32(1), jnp.float32(0)), axis=axis) > 0


def selected(weights: jax.Array, values: jax.Array) -> jax.Array:
    """`weights * values`, 0 where the weight is 0, whatever the value is."""
    return jnp.where(weights != 0, weights * values, 0)


def tokens_where(keep: jax.Array, leaf: jax.Array) -> jax.Array:
    """`leaf [B, T, ...]` of a window with zeros for the tokens that `keep [B, T]` leaves out."""
    return jnp.where(keep.reshape(*keep.shape, *[1] * (leaf.ndim - 2)), leaf, 0)


def sees_any(visible: jax.Array, flags: jax.Array) -> jax.Array:
    """`[..., T]`, whether a token (axis -2 of `visible [..., T, T]`) sees one that `flags [..., T]` names."""
    return jnp.any(visible & flags[..., None, :], axis=-1)
