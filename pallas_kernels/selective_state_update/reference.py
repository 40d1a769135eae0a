"""The op in plain JAX, `implementation="xla"`."""

import jax
import jax.numpy as jnp

from pallas_kernels.entries import inside
from pallas_kernels.order import available_after
from pallas_kernels.ring import Ring, read_history, rows_of, write_tokens
from pallas_kernels.selective_state_update import dual, recurrence
from pallas_kernels.selective_state_update.arguments import Form, StateUpdate
from pallas_kernels.selective_state_update.recurrence import SSMInputs


def update(
    state: jax.Array,
    inputs: SSMInputs,
    A: jax.Array,
    D: jax.Array,
    *,
    layer: int,
    slots: jax.Array,
    parents: jax.Array | None,
    snapshots: jax.Array | None,
    ring: Ring | None,
    fold: jax.Array | None,
    writes_state: bool,
    form: Form,
) -> StateUpdate:
    """The outputs, and the buffers with what the pass left in them."""
    h0 = read_states(state, layer, slots)
    if ring is not None and fold is not None:
        h0 = _fold(form, h0, history(ring, layer, slots), A, rows_of(ring.counts, slots))
        state = write_states(state, layer, jnp.where(fold, slots, -1), h0)
        kept = {"x": inputs.x, "dt": inputs.dt, "B": inputs.B}
        ring = write_tokens(ring, layer, available_after(slots, h0), kept)  # once h0 has read its history there
    if form == "chunk":
        y, snapshots = dual.window_scan(h0, inputs, A, D, parents, snapshots, layer)
        if writes_state:
            window = dual.in_float32(inputs)
            h = dual.window_end(h0.astype(jnp.float32), window, A)
    elif parents is None:
        y, h, snapshots = recurrence.step_scan(h0, inputs, A, D, snapshots, layer)
    else:
        y, snapshots = recurrence.step_tree(h0, inputs, A, D, parents, snapshots, layer)
    if writes_state:
        state = write_states(state, layer, slots, h)
    return StateUpdate(y.astype(inputs.x.dtype), state, snapshots, ring)


def fold_history(
    state: jax.Array,
    ring: Ring,
    A: jax.Array,
    *,
    layer: int,
    slots: jax.Array,
    to_slots: jax.Array,
    num_tokens: jax.Array | None,
    form: Form,
) -> jax.Array:
    """The pool with the states after the first `num_tokens[b]` inputs of each row's ring; its counts by default."""
    num_tokens = rows_of(ring.counts, slots) if num_tokens is None else num_tokens
    h = _fold(form, read_states(state, layer, slots), history(ring, layer, slots), A, num_tokens)
    return write_states(state, layer, jnp.where(inside(slots, state.shape[1]), to_slots, -1), h)


def read_states(state: jax.Array, layer: int, slots: jax.Array) -> jax.Array:
    """`[B, ...]` of one layer, zeros where a slot is out of range."""
    return state.at[layer, _index(state, slots)].get(mode="fill", fill_value=0)


def write_states(state: jax.Array, layer: int, slots: jax.Array, h: jax.Array) -> jax.Array:
    """The pool with `h [B, ...]` in one layer, except where a slot is out of range."""
    return state.at[layer, _index(state, slots)].set(h.astype(state.dtype), mode="drop")


def history(ring: Ring, layer: int, slots: jax.Array) -> SSMInputs:
    """Each row's ring in one layer, oldest first."""
    return SSMInputs(**read_history(ring, layer, slots), C=None)


def _fold(form: Form, h0: jax.Array, inputs: SSMInputs, A: jax.Array, num_tokens: jax.Array) -> jax.Array:
    return (recurrence.fold if form == "step" else dual.fold)(h0, inputs, A, num_tokens)


def _index(state: jax.Array, slots: jax.Array) -> jax.Array:
    """Slots with everything out of range past the end, where JAX drops writes (-1 would wrap around)."""
    return jnp.where(inside(slots, state.shape[1]), slots, state.shape[1])
