"""Mamba-2's recurrence over a whole window at once (the state-space dual form of Dao and Gu 2024), in float32.

    y_t = exp(c_t) h_0 C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t
    h_t = exp(c_t) h_0     + sum_j exp(c_t - c_j) dt_j x_j B_j^T

where c is dt A summed along the path that leads to a token, and j is the token itself or any before it; on a tree, any
ancestor. Letters as in `recurrence.py`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import rounded
from pallas_kernels.selection import finite, is_finite, sees_any, tokens_where
from pallas_kernels.selective_state_update.recurrence import SSMInputs
from pallas_kernels.tree import ancestor_mask

Sums = tuple[jax.Array, jax.Array]  # of a path's dt A, and what rounding took from them

_EXACT = jax.lax.Precision.HIGHEST  # a GPU would otherwise compute float32 products in TF32


def window_scan(
    h0: jax.Array,
    inputs: SSMInputs,
    A: jax.Array,
    D: jax.Array,
    parents: jax.Array | None,
    snapshots: jax.Array | None,
    layer: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Every output of a window, chain or tree, from one read of h0, and the states in `layer` of the snapshots.

    Args:
        h0: `[B, H, P, N]`.
        inputs: of the window.
        A, D: `[H]`.
        parents: `[B, T]`, -1 or an earlier node; None for a chain.
        snapshots: `[L, B, T, H, P, N]`, or None to keep none.
        layer: which layer of the snapshots receives the states.

    Returns:
        y `[B, T, H, P]` in float32, the snapshots.
    """
    h, window = h0.astype(jnp.float32), in_float32(inputs)
    a = rounded(window.dt * A[None, None])
    sums = running_sums(a) if parents is None else path_sums(a, parents)
    visible = None if parents is None else ancestor_mask(parents)
    y = window_outputs(h, window, D, sums, visible)
    if snapshots is None:
        return y, None
    states = window_states(h, window, sums, visible)
    return y, snapshots.at[layer].set(states.astype(snapshots.dtype))


def window_outputs(
    h: jax.Array, window: SSMInputs, D: jax.Array, sums: Sums, visible: jax.Array | None = None
) -> jax.Array:
    """Outputs `[B, T, H, P]` of one window.

    Args:
        h: `[B, H, P, N]` before the window.
        window: its tokens.
        D: `[H]`.
        sums: `[B, T, H]` of dt A up to each token, along its path.
        visible: `[B, T, T]` the tokens each token sees; None is itself and all before it.
    """
    H = h.shape[1]
    scores = jnp.einsum("btgn,bjgn->btjg", window.C, window.B, precision=_EXACT)
    seen = _seen(window, visible)
    weights = jnp.repeat(scores, H // scores.shape[-1], axis=-1) * _decay(sums, seen) * window.dt[:, None]
    weights = jnp.where(seen[..., None], weights, 0)
    y = jnp.einsum("btjh,bjhp->bthp", weights, finite(window.x), precision=_EXACT)
    carried = jnp.einsum("bhpn,bthn->bthp", h, _heads(window.C, H), precision=_EXACT)
    y = y + jnp.exp(sums[0])[..., None] * carried + D[None, None, :, None] * window.x
    return jnp.where(sees_any(seen, _spoilt(window))[..., None, None], jnp.nan, y)


def window_states(h: jax.Array, window: SSMInputs, sums: Sums, visible: jax.Array | None = None) -> jax.Array:
    """States `[B, T, H, P, N]` after each token of one window; arguments as `window_outputs`'s."""
    seen = _seen(window, visible)
    weights = jnp.where(seen[..., None], _decay(sums, seen) * window.dt[:, None], 0)  # [B, T, T, H]
    B = finite(_heads(window.B, h.shape[1]))
    states = jnp.einsum("btjh,bjhp,bjhn->bthpn", weights, finite(window.x), B, precision=_EXACT)
    states = states + jnp.exp(sums[0])[..., None, None] * h[:, None]
    return jnp.where(sees_any(seen, _spoilt(window))[..., None, None, None], jnp.nan, states)


def window_end(h: jax.Array, window: SSMInputs, A: jax.Array) -> jax.Array:
    """The state `[B, H, P, N]` after a chain; cheaper than the last of its `window_states`."""
    sums = running_sums(rounded(window.dt * A[None, None]))
    to_end = jnp.exp(_difference([c[:, -1:] for c in sums], sums))
    weighted = (to_end * window.dt)[..., None] * finite(window.x)
    whole = jnp.exp(jnp.sum(window.dt * A[None, None], axis=1))
    gained = jnp.einsum("bjhp,bjhn->bhpn", weighted, finite(_heads(window.B, h.shape[1])), precision=_EXACT)
    spoilt = jnp.any(_spoilt(window), axis=1)
    return jnp.where(spoilt[:, None, None, None], jnp.nan, h * whole[..., None, None] + gained)


def fold(h0: jax.Array, inputs: SSMInputs, A: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """The state after each row's first `num_tokens[b]` tokens, in float32; later columns may hold anything."""
    exists = jnp.arange(inputs.dt.shape[1], dtype=jnp.int32)[None] < num_tokens[:, None]
    window = jax.tree.map(lambda leaf: tokens_where(exists, leaf), in_float32(inputs))
    return window_end(h0.astype(jnp.float32), window, A)


def in_float32(inputs: SSMInputs) -> SSMInputs:
    """The inputs as the sums take them."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)


def running_sums(a: jax.Array) -> Sums:
    """`c_t = a_1 + .. + a_t` along axis 1, and what rounding took from it, so that differences of c keep their digits.

    A decay from token j to t is exp(c_t - c_j), and c may have grown a thousandfold of that difference.
    """
    return jax.lax.associative_scan(_add_sums, (a, jnp.zeros_like(a)), axis=1)


def path_sums(a: jax.Array, parents: jax.Array) -> Sums:
    """`a [B, T, H]` summed from the root to each node, and what rounding took from the sums, in log2(T) rounds."""

    def at(leaf, nodes):
        return jnp.take_along_axis(leaf, jnp.maximum(nodes, 0)[..., None], axis=1)

    sums, jump = (a, jnp.zeros_like(a)), parents
    # After each round a node holds the sum of twice as many nodes of its path, and its next jump goes twice as far.
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = (jump >= 0)[..., None]
        further = _add_sums((at(sums[0], jump), at(sums[1], jump)), sums)
        sums = jnp.where(above, further[0], sums[0]), jnp.where(above, further[1], sums[1])
        jump = jnp.where(jump >= 0, jnp.take_along_axis(jump, jnp.maximum(jump, 0), axis=1), -1)
    return sums


def _add_sums(x: Sums, y: Sums) -> Sums:
    """The sum of two sums, with what rounding took from it (Knuth's two-sum)."""
    total = x[0] + y[0]
    added = total - x[0]
    return total, x[1] + y[1] + ((x[0] - (total - added)) + (y[0] - added))


def _difference(sums, others) -> jax.Array:
    return (sums[0] - others[0]) + (sums[1] - others[1])


def _seen(window: SSMInputs, visible: jax.Array | None) -> jax.Array:
    """`[B or 1, T, T]`, the tokens (axis 2) that each token sees."""
    T = window.dt.shape[1]
    return jnp.tril(jnp.ones((1, T, T), bool)) if visible is None else visible


def _spoilt(window: SSMInputs) -> jax.Array:
    """`[B, T]`, tokens whose x or B is not finite; not those with dt = 0, which leave every state as it is."""
    whole = jnp.all(is_finite(window.x), axis=(2, 3)) & jnp.all(is_finite(window.B), axis=(2, 3))
    return ~whole & jnp.any(window.dt != 0, axis=2)


def _decay(sums: Sums, seen: jax.Array) -> jax.Array:
    """`exp(c_t - c_j)` where t sees j and 0 elsewhere, `[B, T, T, H]` (t before j)."""
    between = _difference([c[:, :, None] for c in sums], [c[:, None] for c in sums])
    # Masked before the exponential: elsewhere the difference may be positive and overflow.
    return jnp.exp(jnp.where(seen[..., None], between, -jnp.inf))


def _heads(grouped: jax.Array, heads: int) -> jax.Array:
    """`[B, T, G, N]` to `[B, T, H, N]`."""
    return jnp.repeat(grouped, heads // grouped.shape[2], axis=2)
