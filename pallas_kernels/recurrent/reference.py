"""A pass and a fold in plain JAX, `implementation="xla"`."""

import jax
import jax.numpy as jnp

from pallas_kernels.entries import inside
from pallas_kernels.order import available_after
from pallas_kernels.recurrent import steps
from pallas_kernels.recurrent.arguments import Fold, Form, Pass, StateUpdate
from pallas_kernels.recurrent.rule import Rule
from pallas_kernels.ring import Ring, read_history, rows_of, write_tokens
from pallas_kernels.selection import tokens_where
from pallas_kernels.state_scatter.reference import movable, restored


def update(rule: Rule, call: Pass) -> StateUpdate:
    """The outputs, and the buffers with what the pass left in them."""
    inputs, layer, slots, num_tokens = call.inputs, call.layer, call.slots, call.num_tokens
    h0, state, ring, snapshots = read_states(call.state, layer, slots), call.state, call.ring, call.snapshots
    writers = slots
    if num_tokens is not None:
        num_tokens = jnp.where(inside(slots, state.shape[1]), jnp.clip(num_tokens, 0, inputs.values.shape[1]), 0)
        writers = jnp.where(num_tokens > 0, slots, -1)
    if ring is not None and call.fold is not None:
        h0 = _folded(rule, call.form, h0, ring, type(inputs), layer, slots, rows_of(ring.counts, slots))
        state = write_states(state, layer, jnp.where(call.fold, slots, -1), h0)
        kept = {name: getattr(inputs, name) for name in ring.inputs}
        ring = write_tokens(ring, layer, available_after(writers, h0), kept)  # once h0 has read its history there
    if call.form == "chunk":
        window = rule.window(h0, inputs if num_tokens is None else only_first(inputs, num_tokens), call.parents)
        y = window.outputs()
        if snapshots is not None:
            snapshots = snapshots.at[layer].set(window.states().astype(snapshots.dtype))
        if call.writes_state:
            state = write_states(state, layer, slots, window.end())
    elif call.parents is None:
        y, h, snapshots = steps.step_scan(rule, h0, inputs, num_tokens, snapshots, layer)
        if call.writes_state:
            state = write_states(state, layer, slots, h)
    else:
        y, snapshots = steps.step_tree(rule, h0, inputs, num_tokens, call.parents, snapshots, layer)
    return StateUpdate(y.astype(inputs.values.dtype), state, snapshots, ring)


def fold_history(rule: Rule, call: Fold) -> jax.Array:
    """The pool with the states after the first `num_tokens[b]` inputs of each row's ring."""
    num_tokens = rows_of(call.ring.counts, call.slots) if call.num_tokens is None else call.num_tokens
    h0 = read_states(call.state, call.layer, call.slots)
    h = _folded(rule, call.form, h0, call.ring, call.inputs_type, call.layer, call.slots, num_tokens)
    to_slots = jnp.where(inside(call.slots, call.state.shape[1]), call.to_slots, -1)
    return write_states(call.state, call.layer, to_slots, h)


def only_first(inputs, num_tokens: jax.Array):
    """The inputs `[B, T, ...]` with zeros after each row's first `num_tokens[b]` tokens."""
    real = jnp.arange(inputs.values.shape[1], dtype=jnp.int32)[None] < num_tokens[:, None]
    return jax.tree.map(lambda leaf: tokens_where(real, leaf), inputs)


def read_states(pool: jax.Array, layer: int | jax.Array, slots: jax.Array) -> jax.Array:
    """`[B, ...]`, each row's state in one layer; zeros where a slot is out of range."""
    return restored(movable(pool).at[layer, _index(pool, slots)].get(mode="fill", fill_value=0), pool.dtype)


def write_states(pool: jax.Array, layer: int | jax.Array, slots: jax.Array, states: jax.Array) -> jax.Array:
    """The pool with `states [B, ...]` in one layer, except where a slot is out of range; every other byte stays."""
    states = movable(states.astype(pool.dtype))
    return restored(movable(pool).at[layer, _index(pool, slots)].set(states, mode="drop"), pool.dtype)


def _folded(
    rule: Rule,
    form: Form,
    h0: jax.Array,
    ring: Ring,
    inputs_type: type,
    layer: int | jax.Array,
    slots: jax.Array,
    num_tokens: jax.Array,
) -> jax.Array:
    """The states `[B, H, P, N]` after the first inputs of each row's ring."""
    history = inputs_type(**read_history(ring, layer, slots))
    if form == "step":
        return steps.fold(rule, h0, history, num_tokens)
    return rule.window(h0, only_first(history, num_tokens), None).end()


def _index(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """Slots with everything out of range past the end, where JAX drops writes (-1 would wrap around)."""
    return jnp.where(inside(slots, pool.shape[1]), slots, pool.shape[1])
