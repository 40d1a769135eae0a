"""What the chunked kernels share: products on tensor cores, and the decays between the tokens of a window."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import triton
from pallas_kernels.selection import is_finite

SIDE = 16  # the least side of a product, and the tokens of a history taken at once
_PIECES = 3  # bfloat16 numbers that hold the digits of a float32 one


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product on tensor cores with errors of float32's size: in bfloat16 pieces, the smallest products first."""
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return lax.dot(a, b, preferred_element_type=jnp.float32)
    products = [
        lax.dot(x, y, preferred_element_type=jnp.float32)
        for size in reversed(range(_PIECES))
        for i, x in enumerate(_pieces(a))
        for j, y in enumerate(_pieces(b))
        if i + j == size
    ]
    return functools.reduce(operator.add, products)


def visible_tokens(visible_ref: Any, row: jax.Array, t: jax.Array, tokens: int) -> jax.Array:
    """`[t, t]` float32, 1 where a token (axis 0) is on the path to another (axis 1), itself included.

    Args:
        visible_ref: `[B, tokens, tokens]` int32, whether a node (axis 2) is on the path to another; None for a chain.
        row: of the axis B.
        t: the tokens' numbers, which may reach past the last one.
        tokens: how many there are.
    """
    if visible_ref is None:
        return (t[:, None] <= t[None, :]).astype(jnp.float32)
    at = visible_ref.at[row, t[None, :], t[:, None]]
    return triton.load(at, mask=grid(t < tokens, t < tokens), other=0).astype(jnp.float32)


def decays(visible: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From each token (axis 0) to each that sees it (axis 1), 0 where none does; and from the start to each token.

    Args:
        visible: `[tokens, tokens]`, 1 where axis 0 is on the path to axis 1, else 0.
        a: `[tokens]`, the logarithm of each token's decay.
    """
    # An a that is not finite is left out of the products, and the tokens that see it are NaN.
    whole = is_finite(a)
    on_path = visible * jnp.where(whole, a, 0)[:, None]
    between = dot(before(visible), on_path)  # of the tokens on the path to axis 1, those that see axis 0 and are not it
    since_start = jnp.exp(jnp.sum(on_path, axis=0))
    spoilt = jnp.sum(visible * jnp.where(whole, 0, 1).astype(jnp.float32)[:, None], axis=0) > 0
    return visible * jnp.exp(between), jnp.where(spoilt, jnp.nan, since_start)


def before(visible: jax.Array) -> jax.Array:
    """`visible` without the tokens themselves, in bfloat16, which holds it exactly."""
    t = jnp.arange(visible.shape[0], dtype=jnp.int32)
    return jnp.where(t[:, None] == t[None, :], 0, visible).astype(jnp.bfloat16)


def grid(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A mask of both sides; None is all of one."""
    everywhere = jnp.full((1, 1), True)
    return (everywhere if rows is None else rows[:, None]) & (everywhere if columns is None else columns[None, :])


def _pieces(values: jax.Array) -> list[jax.Array]:
    """bfloat16 numbers that add up to the values: their leading digits, then the next ones."""
    if values.dtype == jnp.bfloat16:
        return [values]
    pieces, rest = [], values.astype(jnp.float32)
    for _ in range(_PIECES):
        # Cut off rather than rounded: a compiler may drop a conversion there and back, which would leave no rest.
        leading = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & -0x10000, jnp.float32)
        pieces.append(leading.astype(jnp.bfloat16))
        rest = rest - leading
    return pieces
