"""Sums of the logarithms of decays along the path that leads to each token, in plain JAX.

A decay from token j to t is exp(c_t - c_j), where c may have grown a thousandfold of that difference: so a sum carries
what rounding took from it.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.tree import ancestor_mask

Sums = tuple[jax.Array, jax.Array]  # along a path, and what rounding took from them

EXACT = jax.lax.Precision.HIGHEST  # a GPU would otherwise compute float32 products in TF32


def path_sums(a: jax.Array, parents: jax.Array | None) -> Sums:
    """`a [B, T, ...]` summed from the root to each node, itself included, in log2(T) rounds; parents None: a chain."""
    exact = a, jnp.zeros_like(a)
    if parents is None:
        return jax.lax.associative_scan(_add, exact, axis=1)

    def at(leaf, nodes):
        nodes = jnp.maximum(nodes, 0)
        return jnp.take_along_axis(leaf, nodes.reshape(*nodes.shape, *[1] * (leaf.ndim - 2)), axis=1)

    sums, jump = exact, parents
    # After each round a node holds the sum of twice as many nodes of its path, and its next jump goes twice as far.
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = (jump >= 0).reshape(*jump.shape, *[1] * (a.ndim - 2))
        further = _add((at(sums[0], jump), at(sums[1], jump)), sums)
        sums = jnp.where(above, further[0], sums[0]), jnp.where(above, further[1], sums[1])
        jump = jnp.where(jump >= 0, at(jump, jump), -1)
    return sums


def decay_between(sums: Sums, visible: jax.Array) -> jax.Array:
    """`exp(c_t - c_j)` where t sees j and 0 elsewhere: `[B, T, T, ...]`, t before j, of `visible [B or 1, T, T]`."""
    between = _difference([leaf[:, :, None] for leaf in sums], [leaf[:, None] for leaf in sums])
    # Masked before the exponential: elsewhere the difference may be positive and overflow.
    visible = visible.reshape(*visible.shape, *[1] * (between.ndim - 3))
    return jnp.exp(jnp.where(visible, between, -jnp.inf))


def decay_to_end(sums: Sums) -> jax.Array:
    """`exp(c_T - c_t)` from each token of a chain to its last: `[B, T, ...]`."""
    return jnp.exp(_difference([leaf[:, -1:] for leaf in sums], sums))


def visible_nodes(tokens: int, parents: jax.Array | None) -> jax.Array:
    """`[B or 1, T, T]` bool, the tokens (axis 2) that each token sees: itself and its ancestors."""
    return jnp.tril(jnp.ones((1, tokens, tokens), bool)) if parents is None else ancestor_mask(parents)


def _add(x: Sums, y: Sums) -> Sums:
    """The sum of two sums, with what rounding took from it (Knuth's two-sum)."""
    total = x[0] + y[0]
    added = total - x[0]
    return total, x[1] + y[1] + ((x[0] - (total - added)) + (y[0] - added))


def _difference(sums, others) -> jax.Array:
    """`c_t - c_j`, exact to rounding."""
    return (sums[0] - others[0]) + (sums[1] - others[1])
