"""The gated delta rule over a whole window at once, along a chain or along every path of a tree.

With G_t the sum of g from the root to t, and sums over ancestors j of t (t itself included only where said so):

    (I + L) U = diag(beta) (V - S_0 (exp(G_t) k_t)),     L_tj = beta_t k_t^T diag(exp(G_t - G_j)) k_j
    o_t = S_0 (exp(G_t) q_t) + sum_{j <= t} u_j (k_j^T diag(exp(G_t - G_j)) q_t)
    S_t = S_0 diag(exp(G_t)) + sum_{j <= t} u_j (exp(G_t - G_j) k_j)^T

(the WY form of Yang et al. 2024 under an ancestor mask). L is strictly lower triangular, as parents come before
children. Letters and tokens are `recurrence.py`'s; everything here is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_update.recurrence import Tokens, per_head
from pallas_kernels.selection import is_finite, sees_any
from pallas_kernels.tree import ancestor_mask

Sums = tuple[jax.Array, jax.Array]  # of g along a path, and what rounding took from them

_EXACT = jax.lax.Precision.HIGHEST  # a GPU would otherwise compute float32 products in TF32


class Window(NamedTuple):
    """A solved window.

    Attributes:
        state: `[B, Hv, V, K]` before it.
        k, q: `[B, T, Hk, K]` of unit length.
        updates: `[B, Hv, T, V]`, the u_t, 0 where spoilt.
        spoilt: `[B, Hv, T]` bool, tokens that see one with numbers that are not finite.
        sums: `[B, T, Hv, 1 or K]`, the G_t.
        visible: `[B or 1, T, T]` bool, where j is t or its ancestor.
    """

    state: jax.Array
    k: jax.Array
    q: jax.Array
    updates: jax.Array
    spoilt: jax.Array
    sums: Sums
    visible: jax.Array


def solve(state: jax.Array, tokens: Tokens, parents: jax.Array | None) -> Window:
    """Solves a window of `unit_tokens`; parents is `[B, T]` int32, -1 or an earlier node, or None for a chain."""
    T, heads = tokens.k.shape[1], state.shape[1]
    state = state.astype(jnp.float32)
    if parents is None:
        sums, visible = jax.lax.associative_scan(_add, _exact(tokens.g), axis=1), jnp.tril(jnp.ones((1, T, T), bool))
    else:
        sums, visible = _path_sums(tokens.g, parents), ancestor_mask(parents)
    beta = jnp.moveaxis(tokens.beta, 1, 2)[..., None]  # [B, Hv, T, 1]
    carried = _from_state(state, tokens.k, sums)
    before = visible & ~jnp.eye(T, dtype=bool)
    lower = beta * _scores(tokens.k, tokens.k, sums, before, heads)
    right = beta * (jnp.moveaxis(tokens.v, 1, 2) - carried)
    # A solver multiplies: it is given zeros for a token that is not finite, and solves those that do not see it.
    whole = jnp.all(is_finite(lower), axis=-1) & jnp.all(is_finite(right), axis=-1)
    lower, right = (jnp.where(whole[..., None], part, 0) for part in (lower, right))
    updates = jax.lax.linalg.triangular_solve(lower, right, left_side=True, lower=True, unit_diagonal=True)
    spoilt = sees_any(visible[:, None], ~(whole & jnp.all(is_finite(updates), axis=-1)))
    return Window(state, tokens.k, tokens.q, jnp.where(spoilt[..., None], 0, updates), spoilt, sums, visible)


def outputs(window: Window) -> jax.Array:
    """`[B, T, Hv, V]`, the output of every token."""
    scores = _scores(window.q, window.k, window.sums, window.visible, window.state.shape[1])
    within = jnp.einsum("bhtj,bhjv->bhtv", scores, window.updates, precision=_EXACT)
    o = _from_state(window.state, window.q, window.sums) + within
    return jnp.moveaxis(jnp.where(window.spoilt[..., None], jnp.nan, o), 2, 1)


def states(window: Window) -> jax.Array:
    """`[B, T, Hv, V, K]`, the state after every token."""
    k = per_head(window.k, window.state.shape[1], axis=2)
    keys = _between(window.sums, window.visible) * k[:, None]  # [B, T, T, Hv, K]
    keys = jnp.where(window.visible[..., None, None], keys, 0)
    added = jnp.einsum("bhjv,btjhk->bthvk", window.updates, keys, precision=_EXACT)
    after = jnp.exp(window.sums[0])[:, :, :, None] * window.state[:, None] + added
    return jnp.where(jnp.moveaxis(window.spoilt, 1, 2)[..., None, None], jnp.nan, after)


def last_state(window: Window) -> jax.Array:
    """`[B, Hv, V, K]`, the state after the last token of a chain."""
    to_end = jnp.exp(_difference([leaf[:, -1:] for leaf in window.sums], window.sums))
    k = per_head(window.k, window.state.shape[1], axis=2) * to_end
    added = jnp.einsum("bhjv,bjhk->bhvk", window.updates, k, precision=_EXACT)
    after = jnp.exp(window.sums[0][:, -1])[:, :, None] * window.state + added
    return jnp.where(window.spoilt[:, :, -1, None, None], jnp.nan, after)


def _from_state(state: jax.Array, x: jax.Array, sums: Sums) -> jax.Array:
    """`S_0 (exp(G_t) x_t)`, `[B, Hv, T, V]`."""
    decayed = per_head(x, state.shape[1], axis=2) * jnp.exp(sums[0])
    return jnp.einsum("bhvk,bthk->bhtv", state, decayed, precision=_EXACT)


def _scores(x: jax.Array, k: jax.Array, sums: Sums, visible: jax.Array, heads: int) -> jax.Array:
    """`x_t^T diag(exp(G_t - G_j)) k_j` where t sees j and 0 elsewhere, `[B, Hv, T, T]`."""
    between = _between(sums, visible)
    if between.shape[-1] == 1:  # one decay a head: a plain product of the key heads will do
        products = jnp.einsum("bthk,bjhk->bhtj", x, k, precision=_EXACT)
        scores = per_head(products, heads) * jnp.moveaxis(between[..., 0], 3, 1)
    else:
        x, k = per_head(x, heads, axis=2), per_head(k, heads, axis=2)
        scores = jnp.moveaxis(jnp.sum(x[:, :, None] * k[:, None] * between, axis=-1), 3, 1)
    return jnp.where(visible[:, None], scores, 0)


def _between(sums: Sums, visible: jax.Array) -> jax.Array:
    """`exp(G_t - G_j)` where t sees j and 0 elsewhere, `[B, T, T, Hv, 1 or K]`, t before j."""
    between = _difference([leaf[:, :, None] for leaf in sums], [leaf[:, None] for leaf in sums])
    # Masked before the exponential: elsewhere the difference may be positive and overflow.
    return jnp.exp(jnp.where(visible[..., None, None], between, -jnp.inf))


def _path_sums(g: jax.Array, parents: jax.Array) -> Sums:
    """g summed from the root to each node, and what rounding took from it, in log2(T) rounds."""

    def at(leaf, nodes):
        return jnp.take_along_axis(leaf, jnp.maximum(nodes, 0).reshape(*nodes.shape, *[1] * (leaf.ndim - 2)), axis=1)

    sums, jump = _exact(g), parents
    # After each round a node holds the sum of twice as many nodes of its path, and its next jump goes twice as far.
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = (jump >= 0)[..., None, None]
        further = _add((at(sums[0], jump), at(sums[1], jump)), sums)
        sums = jnp.where(above, further[0], sums[0]), jnp.where(above, further[1], sums[1])
        jump = jnp.where(jump >= 0, at(jump, jump), -1)
    return sums


def _exact(g: jax.Array) -> Sums:
    return g, jnp.zeros_like(g)


def _add(x: Sums, y: Sums) -> Sums:
    """The sum of two sums, with what rounding took from it (Knuth's two-sum)."""
    total = x[0] + y[0]
    added = total - x[0]
    return total, x[1] + y[1] + ((x[0] - (total - added)) + (y[0] - added))


def _difference(sums, others) -> jax.Array:
    """`G_t - G_j`, exact to rounding though both may have grown a thousandfold of it."""
    return (sums[0] - others[0]) + (sums[1] - others[1])
