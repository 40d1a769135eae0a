"""The op in plain JAX, `implementation="xla"`: reads the rows' states, runs the recurrence, writes where asked."""

import jax
import jax.numpy as jnp

from pallas_kernels.entries import inside
from pallas_kernels.gated_delta_update import recurrence
from pallas_kernels.gated_delta_update.arguments import Call, DeltaUpdate, Fold, Form
from pallas_kernels.gated_delta_update.recurrence import Tokens, unit_tokens
from pallas_kernels.gated_delta_update.window import last_state, outputs, solve, states
from pallas_kernels.ring import Ring, read_history, rows_of, write_tokens
from pallas_kernels.selection import tokens_where
from pallas_kernels.state_scatter.reference import movable, restored


def update(call: Call) -> DeltaUpdate:
    """The outputs, and the buffers with what the pass left in them."""
    valid = inside(call.slots, call.state.shape[1])
    tokens, layer, scale = call.tokens, call.layer, call.scale
    num_tokens = jnp.where(valid, jnp.clip(call.num_tokens, 0, tokens.k.shape[1]), 0)
    start, pool, ring, snapshots = read_states(call.state, layer, call.slots), call.state, call.ring, call.snapshots
    if ring is not None:
        # Written before the history is read: in the other order XLA copies the ring.
        kept = {"k": tokens.k, "v": tokens.v, "g": tokens.g, "beta": tokens.beta}
        ring = write_tokens(ring, layer, jnp.where(num_tokens > 0, call.slots, -1), kept)
        counts = jnp.where(valid, rows_of(ring.counts, call.slots), 0)
        start = _fold(call.form, start, ring, layer, call.slots, counts)
        pool = write_states(pool, layer, call.slots, valid & call.fold, start)

    if call.form == "chunk":
        window = solve(start, unit_tokens(only_first(tokens, num_tokens), scale), call.parents)
        o, after = outputs(window), last_state(window)
        if snapshots is not None:
            snapshots = snapshots.at[layer].set(states(window).astype(snapshots.dtype))
    elif call.parents is None:
        o, after, snapshots = recurrence.step_scan(start, tokens, num_tokens, scale, snapshots, layer)
    else:
        o, snapshots = recurrence.step_tree(start, tokens, num_tokens, scale, call.parents, snapshots, layer)
    if call.advance:
        pool = write_states(pool, layer, call.slots, valid, after)
    return DeltaUpdate(o.astype(tokens.v.dtype), pool, snapshots, ring)


def fold_history(call: Fold) -> jax.Array:
    """The pool with the states after the first `num_tokens[b]` inputs of each row's ring."""
    valid = inside(call.slots, call.state.shape[1])
    start = read_states(call.state, call.layer, call.slots)
    after = _fold(call.form, start, call.ring, call.layer, call.slots, jnp.where(valid, call.num_tokens, 0))
    return write_states(call.state, call.layer, call.to_slots, valid, after)


def only_first(tokens: Tokens, num_tokens: jax.Array) -> Tokens:
    """The tokens with zeros after each row's first `num_tokens[b]`: these change nothing, and their output is 0."""
    real = jnp.arange(tokens.k.shape[1], dtype=jnp.int32)[None] < num_tokens[:, None]
    return jax.tree.map(lambda leaf: tokens_where(real, leaf), tokens)


def read_states(pool: jax.Array, layer: int, slots: jax.Array) -> jax.Array:
    """`[B, Hv, V, K]`, each row's state in one layer; 0 where the slot is out of range."""
    slots = jnp.where(slots >= 0, slots, pool.shape[1])
    return restored(movable(pool).at[layer, slots].get(mode="fill", fill_value=0), pool.dtype)


def write_states(pool: jax.Array, layer: int, slots: jax.Array, valid: jax.Array, states: jax.Array) -> jax.Array:
    """The pool with the states of the rows where `valid` in one layer; every other byte stays."""
    states = movable(states.astype(pool.dtype))
    slots = jnp.where(valid & inside(slots, pool.shape[1]), slots, pool.shape[1])
    return restored(movable(pool).at[layer, slots].set(states, mode="drop"), pool.dtype)


def _fold(form: Form, start: jax.Array, ring: Ring, layer: int, slots: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """The states `[B, Hv, V, K]` after the first inputs of each row's ring, in their dtype."""
    history = Tokens(**read_history(ring, layer, slots))
    if form == "step":
        return recurrence.fold(start, history, num_tokens)
    window = solve(start, unit_tokens(only_first(history, num_tokens), 1.0), None)
    return last_state(window).astype(start.dtype)
