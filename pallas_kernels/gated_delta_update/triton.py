"""The step form as one Triton kernel, for sm_80 and later.

Grid `(V blocks, Hv, B)`: a program of up to 4 warps keeps 32 rows of V (16 of a 16-bit state) of one head in registers,
takes them through the row's history and then its tokens, and stores them where the mode says. Loops run as often as
there are tokens, and their body is the same whatever T. Of a tree it keeps the first state alone, and comes to each
node along its path from there: a step more an ancestor, and no bytes. Bytes moved: the state read once and written only
where it changes, which is the least possible; k, q and the gates of a token once for each block of the Hv/Hk heads that
read them, from the second time on out of a cache. Precision: float32, no tensor cores; the compiler rounds every
product before it adds (`tests/aot` looks for fused ones), so a token has the same bits in every pass.

The programs of a row share its ring, and none waits for another: in the ring's order, a permutation that no kernel
changes, what they write follows the history that they read, and each entry is written by one of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_update.operands import launch_fold, launch_update, stored_count, writes_state
from pallas_kernels.gated_delta_update.recurrence import GatedDelta, Tokens
from pallas_kernels.gated_delta_update.tile import (
    Tile,
    block_rows,
    load_state,
    load_token,
    output,
    slot_of,
    step,
    store_output,
    store_state,
    store_token,
    tile_of,
)
from pallas_kernels.history import History
from pallas_kernels.launch import fitting_warps
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.tree import ancestor_mask

_MOST_WARPS = 4


def update(rule: GatedDelta, call: Pass, *, interpret: bool) -> StateUpdate:
    """The step form, on chains and trees."""
    (_, S, _, V, _), dtype, layer = call.state.shape, call.state.dtype, np.int32(call.layer)
    (T, Hk), rows = call.inputs.k.shape[1:3], block_rows(V, dtype)

    def gated_delta_update_kernel(reads, o_ref, buffers):
        state_ref = buffers.state if writes_state(call) else reads.state
        b, tile = pl.program_id(2), tile_of(pl.program_id(0), pl.program_id(1), call.state, Hk)
        slot, valid = slot_of(reads.slots, b, S)
        count = jnp.where(valid, jnp.clip(reads.num_tokens[b], 0, T), 0)
        state = load_state(tile, state_ref, (layer, slot), where=valid)
        if call.ring is not None:
            history = History(reads.order, slot, reads.starts[slot], jnp.where(valid, reads.counts[slot], 0))
            state = _replay(tile, state, buffers.kept, layer, history, dtype)
            pl.when(valid & reads.fold[b])(lambda: store_state(tile, state_ref, (layer, slot), state))

        def advance(t, state):
            token = load_token(tile, reads.tokens, (b, t))
            if call.ring is not None:
                store_token(tile, buffers.kept, (layer, slot, history.entry(history.size + t)), token)
            tree = reads.visible is not None
            before = _up_to(tile, t, reads.visible, reads.tokens, b, state, dtype) if tree else state
            after = step(before, token)
            store_output(tile, o_ref, (b, t), output(after, token, rule.scale))
            if call.snapshots is not None:
                store_state(tile, buffers.snapshots, (layer, b, t), after)
            return state if tree else _rounded(after, dtype)

        state = lax.fori_loop(0, count, advance, state)
        if call.writes_state:
            pl.when(count > 0)(lambda: store_state(tile, state_ref, (layer, slot), state))
        nothing = jnp.zeros(rows, jnp.float32)
        lax.fori_loop(count, T, lambda t, _: store_output(tile, o_ref, (b, t), nothing), None)

    visible = None if call.parents is None else ancestor_mask(call.parents)
    launched: dict[str, Any] = {"rows": rows, "num_warps": _warps(call.state), "interpret": interpret}
    return launch_update(gated_delta_update_kernel, call, visible, **launched)


def fold_history(rule: GatedDelta, call: Fold, *, interpret: bool) -> jax.Array:
    """The pool with the states after the first inputs of each row's ring, with `update`'s bits."""
    (_, S, _, V, _), dtype, layer = call.state.shape, call.state.dtype, np.int32(call.layer)
    Hk = call.ring.inputs["k"].shape[3]

    def gated_delta_fold_kernel(reads, _, buffers):
        b, tile = pl.program_id(2), tile_of(pl.program_id(0), pl.program_id(1), call.state, Hk)
        (slot, valid), (to_slot, has_target) = slot_of(reads.slots, b, S), slot_of(reads.to_slots, b, S)
        count = jnp.where(valid & has_target, jnp.clip(stored_count(reads, b, slot), 0, call.ring.length), 0)
        state = load_state(tile, buffers.state, (layer, slot), where=valid & has_target)
        state = _replay(tile, state, reads.kept, layer, History(reads.order, slot, reads.starts[slot], count), dtype)
        pl.when(valid & has_target)(lambda: store_state(tile, buffers.state, (layer, to_slot), state))

    launched: dict[str, Any] = {"rows": block_rows(V, dtype), "num_warps": _warps(call.state), "interpret": interpret}
    return launch_fold(gated_delta_fold_kernel, call, **launched)


def _warps(pool: jax.Array) -> int:
    """Warps of a program; one rule for every pass, as the order of the sums depends on it."""
    V, K = pool.shape[3:]
    return fitting_warps(block_rows(V, pool.dtype) * pl.next_power_of_2(K), _MOST_WARPS)


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
