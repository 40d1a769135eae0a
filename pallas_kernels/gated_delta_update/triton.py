"""The step form as one Triton kernel, for sm_80 and later.

Grid `(V blocks, Hv, B)`: a program of 4 warps keeps 32 rows of V (16 of a 16-bit state) of one head in registers, takes
them through the row's history and then its tokens, and stores them where the mode says. Loops run as often as there are
tokens, and their body is the same whatever T. Of a tree it keeps the first state alone, and comes to each node along
its path from there: a step more an ancestor, and no bytes. Bytes moved: the state read once and written only where it
changes, which is the least possible; k, q and the gates of a token once for each block of the Hv/Hk heads that read
them, from the second time on out of a cache. Precision: float32, no tensor cores; the compiler rounds every product
before it adds (`tests/aot` looks for fused ones), so a token has the same bits in every pass.

The programs of a row share its ring, and none waits for another: in the ring's order, a permutation that no kernel
changes, what they write comes behind the history that they read, and each entry is written by one of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.entries import inside
from pallas_kernels.gated_delta_update.arguments import Call, DeltaUpdate, Fold
from pallas_kernels.gated_delta_update.recurrence import Tokens
from pallas_kernels.gated_delta_update.tile import (
    Tile,
    block_rows,
    load_state,
    load_token,
    output,
    step,
    store_output,
    store_state,
    store_token,
    tile_of,
)
from pallas_kernels.history import History
from pallas_kernels.launch import launch
from pallas_kernels.state_scatter.triton import check_offsets
from pallas_kernels.tree import ancestor_mask

NUM_WARPS = 4


def update(call: Call, *, interpret: bool) -> DeltaUpdate:
    """The step form, on chains and trees."""
    (_, S, Hv, V, _), dtype, layer = call.state.shape, call.state.dtype, np.int32(call.layer)
    (T, Hk), rows = call.tokens.k.shape[1:3], block_rows(V, dtype)
    kept, cursors = None, None
    if call.ring is not None:
        kept = Tokens(**call.ring.inputs)
        cursors = call.ring.order, call.ring.starts, call.ring.counts, call.fold
    writes_state = call.advance or call.ring is not None
    visible = None if call.parents is None else ancestor_mask(call.parents)

    def gated_delta_update_kernel(inputs, o_ref, buffers):
        tokens, visible_ref, slots_ref, num_tokens_ref, cursor_refs, read_ref = inputs
        written_ref, snapshots_ref, kept_refs = buffers
        state_ref = written_ref if writes_state else read_ref
        b, tile = pl.program_id(2), tile_of(pl.program_id(0), pl.program_id(1), call.state, Hk)
        slot, valid = _slot(slots_ref, b, S)
        count = jnp.where(valid, jnp.clip(num_tokens_ref[b], 0, T), 0)
        state = load_state(tile, state_ref, (layer, slot))
        if call.ring is not None:
            order_ref, starts_ref, counts_ref, fold_ref = cursor_refs
            history = History(order_ref, slot, starts_ref[slot], jnp.where(valid, counts_ref[slot], 0))
            state = _replay(tile, state, kept_refs, layer, history, dtype)
            pl.when(valid & fold_ref[b])(lambda: store_state(tile, state_ref, (layer, slot), state))

        def advance(t, state):
            token = load_token(tile, tokens, (b, t))
            if call.ring is not None:
                store_token(tile, kept_refs, (layer, slot, history.entry(history.size + t)), token)
            before = state if visible is None else _up_to(tile, t, visible_ref, tokens, b, state, dtype)
            after = step(before, token)
            store_output(tile, o_ref, (b, t), output(after, token, call.scale))
            if call.snapshots is not None:
                store_state(tile, snapshots_ref, (layer, b, t), after)
            return _rounded(after, dtype) if visible is None else state

        state = lax.fori_loop(0, count, advance, state)
        if call.advance:
            pl.when(count > 0)(lambda: store_state(tile, state_ref, (layer, slot), state))
        nothing = jnp.zeros(rows, jnp.float32)
        lax.fori_loop(count, T, lambda t, _: store_output(tile, o_ref, (b, t), nothing), None)

    inputs = call.tokens, visible, call.slots, call.num_tokens, cursors, None if writes_state else call.state
    buffers = call.state if writes_state else None, call.snapshots, kept
    check_offsets("gated_delta_update", jax.tree.leaves((inputs, buffers)))
    o, (state, snapshots, kept) = launch(
        gated_delta_update_kernel,
        (pl.cdiv(V, rows), Hv, call.slots.size),
        inputs,
        jax.ShapeDtypeStruct(call.tokens.v.shape, call.tokens.v.dtype),
        buffers,
        num_warps=NUM_WARPS,
        interpret=interpret,
    )
    ring = None
    if call.ring is not None:
        ring = call.ring._replace(inputs={name: getattr(kept, name) for name in call.ring.inputs})
    return DeltaUpdate(o, state if writes_state else call.state, snapshots, ring)


def fold_history(call: Fold, *, interpret: bool) -> jax.Array:
    """The pool with the states after the first inputs of each row's ring, with `update`'s bits."""
    (_, S, Hv, V, _), dtype, layer = call.state.shape, call.state.dtype, np.int32(call.layer)
    kept = Tokens(**call.ring.inputs)

    def gated_delta_fold_kernel(inputs, _, state_ref):
        kept_refs, order_ref, starts_ref, slots_ref, to_slots_ref, num_tokens_ref = inputs
        b, tile = pl.program_id(2), tile_of(pl.program_id(0), pl.program_id(1), call.state, kept.k.shape[3])
        (slot, valid), (to_slot, has_target) = _slot(slots_ref, b, S), _slot(to_slots_ref, b, S)
        count = jnp.where(valid & has_target, jnp.clip(num_tokens_ref[b], 0, call.ring.length), 0)
        history = History(order_ref, slot, starts_ref[slot], count)
        state = load_state(tile, state_ref, (layer, slot))
        state = _replay(tile, state, kept_refs, layer, history, dtype)
        pl.when(valid & has_target)(lambda: store_state(tile, state_ref, (layer, to_slot), state))

    inputs = kept, call.ring.order, call.ring.starts, call.slots, call.to_slots, call.num_tokens
    check_offsets("gated_delta_update", jax.tree.leaves((inputs, call.state)))
    _, state = launch(
        gated_delta_fold_kernel,
        (pl.cdiv(V, block_rows(V, dtype)), Hv, call.slots.size),
        inputs,
        None,
        call.state,
        num_warps=NUM_WARPS,
        interpret=interpret,
    )
    return state


def _slot(slots_ref: Any, b: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """A row's slot, 0 where it is out of range, and whether it is not."""
    slot = slots_ref[b]
    valid = inside(slot, num_slots)
    return jnp.where(valid, slot, 0), valid


def _replay(tile: Tile, state: jax.Array, refs: Tokens, layer: Any, history: History, dtype: Any) -> jax.Array:
    """The tile after the history, of which the ring's refs hold the inputs, rounded as the pool would hold it."""

    def replay(i, state):
        return _rounded(step(state, load_token(tile, refs, (layer, history.slot, history.entry(i)))), dtype)

    return lax.fori_loop(0, history.size, replay, state)


def _up_to(
    tile: Tile, t: jax.Array, visible_ref: Any, tokens: Tokens, b: jax.Array, state: jax.Array, dtype: Any
) -> jax.Array:
    """The state of node t's parent, as it would have been stored: the first state advanced along the path."""

    def visit(j, state):
        def advance(state):
            return _rounded(step(state, load_token(tile, tokens._replace(q=None), (b, j))), dtype)

        return lax.cond(visible_ref[b, t, j], advance, lambda state: state, state)

    return lax.fori_loop(0, t, visit, state)


def _rounded(state: jax.Array, dtype: Any) -> jax.Array:
    return state.astype(dtype).astype(jnp.float32)
