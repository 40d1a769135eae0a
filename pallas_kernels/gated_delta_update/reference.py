"""The op in plain JAX, `implementation="xla"`: reads the rows' states, runs the recurrence, writes where asked."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.entries import inside
from pallas_kernels.gated_delta_update.recurrence import Tokens, fold, step_scan, step_tree, unit_tokens
from pallas_kernels.gated_delta_update.window import outputs, solve, states
from pallas_kernels.order import available_after
from pallas_kernels.ring import Ring, read_history, rows_of, write_tokens
from pallas_kernels.state_scatter.reference import movable, restored


class Call(NamedTuple):
    """What the implementations take; shapes as in `api.py`, everything checked.

    advance: whether the state behind the tokens goes to the pool; chunked: whether the window is solved at once.
    """

    state: jax.Array
    tokens: Tokens
    slots: jax.Array
    num_tokens: jax.Array
    layer: int
    scale: float
    advance: bool
    snapshots: jax.Array | None
    ring: Ring | None
    fold: Any
    parents: jax.Array | None
    chunked: bool


class Updated(NamedTuple):
    """What the op returns.

    Attributes:
        o: `[B, T, Hv, V]` outputs in v's dtype; 0 for tokens past `num_tokens` and rows without a slot.
        state: the pool, in its own buffer if it was donated.
        snapshots: with this layer's states, or None.
        ring: with this layer's inputs and the cursors as they came, or None.
    """

    o: jax.Array
    state: jax.Array
    snapshots: jax.Array | None
    ring: Ring | None


def update(call: Call) -> Updated:
    """Any mode of the op."""
    valid = inside(call.slots, call.state.shape[1])
    num_tokens = jnp.where(valid, call.num_tokens, 0)
    tokens = call.tokens
    start, ring, pool = read_states(call.state, call.layer, call.slots), call.ring, call.state
    if ring is not None:
        counts = jnp.where(valid, rows_of(ring.counts, call.slots), 0)
        start = fold(start, Tokens(**read_history(ring, call.layer, call.slots)), counts)
        pool = write_states(pool, call.layer, call.slots, valid & call.fold, start)
        kept = {"k": tokens.k, "v": tokens.v, "g": tokens.g, "beta": tokens.beta}
        targets = available_after(jnp.where(num_tokens > 0, call.slots, -1), start)
        ring = write_tokens(ring, call.layer, targets, kept)

    snapshots = call.snapshots
    if call.chunked:
        window = solve(start, unit_tokens(only_first(tokens, num_tokens), call.scale), call.parents)
        o = outputs(window)
        if snapshots is not None:
            snapshots = snapshots.at[call.layer].set(states(window).astype(snapshots.dtype))
    elif call.parents is None:
        o, after, snapshots = step_scan(start, tokens, num_tokens, call.scale, snapshots, call.layer)
        if call.advance:
            pool = write_states(pool, call.layer, call.slots, valid, after)
    else:
        o, snapshots = step_tree(start, tokens, num_tokens, call.scale, call.parents, snapshots, call.layer)
    return Updated(o.astype(tokens.v.dtype), pool, snapshots, ring)


def only_first(tokens: Tokens, num_tokens: jax.Array) -> Tokens:
    """The tokens with zeros behind each row's first `num_tokens[b]`: they change nothing, and their output is 0."""
    real = jnp.arange(tokens.k.shape[1], dtype=jnp.int32) < num_tokens[:, None]
    return jax.tree.map(lambda leaf: jnp.where(real.reshape(*real.shape, *[1] * (leaf.ndim - 2)), leaf, 0), tokens)


def read_states(pool: jax.Array, layer: int, slots: jax.Array) -> jax.Array:
    """`[B, Hv, V, K]`, each row's state in one layer; 0 where the slot is out of range."""
    slots = jnp.where(slots >= 0, slots, pool.shape[1])
    return restored(movable(pool).at[layer, slots].get(mode="fill", fill_value=0), pool.dtype)


def write_states(pool: jax.Array, layer: int, slots: jax.Array, valid: jax.Array, states: jax.Array) -> jax.Array:
    """The pool with the states of the rows where `valid` in one layer; every other byte stays."""
    states = movable(states.astype(pool.dtype))
    written = movable(pool).at[layer, jnp.where(valid, slots, pool.shape[1])].set(states, mode="drop")
    return restored(written, pool.dtype)
