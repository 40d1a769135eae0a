"""The chunked form as one Triton kernel, for sm_80 and later: a window, chain or tree, from one read of the state.

Grid `(V / 32, Hv, B)`: a program keeps 32 rows of one head's state in registers, takes them through the row's history,
16 tokens at a time, and then gives the outputs of the whole window by `window.py`'s equations. Bytes moved are the step
form's (`triton.py`) without a tree's second reads: the state read once and written only where it changes, which is the
least possible. Sums over K and over tokens are products on tensor cores, whose sides are at least 16: a window is
padded to a power of two with tokens that nobody sees. Precision: products of float32 numbers in bfloat16 pieces that
leave errors of float32's size; the state is rounded only where it is stored. Decays between two tokens are summed over
the tokens between them, all of one sign, so that nothing cancels. The triangular system is solved token by token: with
keys that repeat, a product of powers of L would cancel numbers that grow with 2^T. What tokens have in pairs stays in
registers: 16 tokens fit, 32 spill, and each doubling spills far more (sm_80); a prompt is `gated_delta_chunk`'s.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked import SIDE, dot, grid, visible_tokens
from pallas_kernels.compat import triton
from pallas_kernels.gated_delta_update.chunk_tile import Products, State, Window, decay_of
from pallas_kernels.gated_delta_update.operands import launch_fold, launch_update, stored_count, writes_state
from pallas_kernels.gated_delta_update.recurrence import GatedDelta, Tokens
from pallas_kernels.gated_delta_update.tile import Tile, cut, load_stored, slot_of, store_state
from pallas_kernels.history import History
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.selection import finite, selected
from pallas_kernels.tree import ancestor_mask

_ROWS, _COLUMNS = 32, 64  # of V, and of K in one part
NUM_WARPS = 4


def update(rule: GatedDelta, call: Pass, *, interpret: bool) -> StateUpdate:
    """The chunked form, on chains and trees."""
    (_, S, _, V, _), layer = call.state.shape, np.int32(call.layer)
    T, Hk = call.inputs.k.shape[1:3]
    padded = max(SIDE, pl.next_power_of_2(T))

    def gated_delta_update_chunk_kernel(reads, o_ref, buffers):
        state_ref = buffers.state if writes_state(call) else reads.state
        b, parts = pl.program_id(2), _parts(call.state, Hk)
        slot, valid = slot_of(reads.slots, b, S)
        t = jnp.arange(padded, dtype=jnp.int32)
        count = jnp.where(valid, jnp.clip(reads.num_tokens[b], 0, T), 0)
        start: Iterable[jax.Array] = _load(parts, state_ref, (layer, slot), valid)
        if call.ring is not None:
            history = History(reads.order, slot, reads.starts[slot], jnp.where(valid, reads.counts[slot], 0))
            start = folded = _replay(parts, start, buffers.kept, layer, history)
            pl.when(valid & reads.fold[b])(lambda: _store(parts, state_ref, (layer, slot), folded))
        window = Window.of(parts, reads.tokens, (b, t), count)
        if call.ring is not None:
            # Lanes without a token point past the ring, where no interpreter takes them for tokens of an earlier lap.
            entries = jnp.where(window.exist, history.entry(history.size + t), history.length)
            window.keep(buffers.kept, (layer, slot, entries))

        decay = decay_of(window, visible_tokens(reads.visible, b, t, T))
        state, (keys, queries) = decay.products(start, "k", "q")
        updates = _updates(window, keys)
        # Scores of 0 do not take back what is not finite: it is left out, and the tokens that see it are NaN.
        scores = jnp.where(queries.scores != 0, queries.scores + jnp.sum(updates * 0, axis=1)[None, :], 0)
        o = (queries.carried + dot(scores, finite(updates))) * (rule.scale * queries.unit)[:, None]
        o = jnp.where(window.exist[:, None], o, 0)
        at = o_ref.at[b, t[:, None], parts[0].head, parts[0].rows[None, :]]
        triton.store(at, o.astype(o_ref.dtype), mask=grid(t < T, parts[0].has_row))

        def keep(ref, index, step):
            _store(parts, ref, index, decay.after(step, state, updates))

        if call.snapshots is not None:
            lax.fori_loop(0, count, lambda i, _: keep(buffers.snapshots, (layer, b, i), i), None)
        if call.writes_state:
            pl.when(count > 0)(lambda: keep(state_ref, (layer, slot), padded - 1))

    visible = None if call.parents is None else ancestor_mask(call.parents).astype(jnp.int32)
    launched: dict[str, Any] = {"rows": _rows(V), "num_warps": NUM_WARPS, "interpret": interpret}
    return launch_update(gated_delta_update_chunk_kernel, call, visible, **launched)


def fold_history(rule: GatedDelta, call: Fold, *, interpret: bool) -> jax.Array:
    """The pool with the states after the first inputs of each row's ring, with `update`'s bits."""
    (_, S, _, V, _), layer = call.state.shape, np.int32(call.layer)
    Hk = call.ring.inputs["k"].shape[3]

    def gated_delta_fold_chunk_kernel(reads, _, buffers):
        b, parts = pl.program_id(2), _parts(call.state, Hk)
        (slot, valid), (to_slot, has_target) = slot_of(reads.slots, b, S), slot_of(reads.to_slots, b, S)
        size = jnp.where(valid & has_target, jnp.clip(stored_count(reads, b, slot), 0, call.ring.length), 0)
        history = History(reads.order, slot, reads.starts[slot], size)
        start = _load(parts, buffers.state, (layer, slot), valid & has_target)
        state = _replay(parts, start, reads.kept, layer, history)
        pl.when(valid & has_target)(lambda: _store(parts, buffers.state, (layer, to_slot), state))

    launched: dict[str, Any] = {"rows": _rows(V), "num_warps": NUM_WARPS, "interpret": interpret}
    return launch_fold(gated_delta_fold_chunk_kernel, call, **launched)


def _rows(V: int) -> int:
    return max(SIDE, min(_ROWS, pl.next_power_of_2(V)))


def _parts(pool: Any, key_heads: int) -> list[Tile]:
    """The running program's rows of a pool `[L, S, Hv, V, K]`, part by part."""
    V, K = pool.shape[3:]
    width = max(SIDE, min(_COLUMNS, pl.next_power_of_2(K)))
    at = pl.program_id(0), pl.program_id(1), pool, key_heads, _rows(V), width
    return [cut(*at, part) for part in range(pl.cdiv(K, width))]


def _load(parts: list[Tile], ref: Any, index: tuple, where: jax.Array) -> Iterator[jax.Array]:
    """Part by part, each when it is asked for."""
    return (load_stored(part, ref, index, where=where) for part in parts)


def _store(parts: list[Tile], ref: Any, index: tuple, state: State) -> None:
    for part, values in zip(parts, state, strict=True):
        store_state(part, ref, index, values)


def _replay(parts: list[Tile], state: Iterable[jax.Array], refs: Tokens, layer: Any, history: History) -> State:
    """The state after the history, of which the ring's refs hold the inputs, in float32."""
    i = jnp.arange(SIDE, dtype=jnp.int32)

    def step(chunk, state):
        begin = chunk * SIDE
        at = layer, history.slot, history.entry(begin + i)
        tokens = Window.of(parts, refs, at, jnp.minimum(history.size - begin, SIDE))
        decay = decay_of(tokens, (i[:, None] <= i[None, :]).astype(jnp.float32))
        state, (keys,) = decay.products(state, "k")
        return decay.after(SIDE - 1, state, _updates(tokens, keys))

    chunks = lax.div(history.size + SIDE - 1, jnp.int32(SIDE))
    return lax.fori_loop(0, chunks, step, [values.astype(jnp.float32) for values in state])


def _updates(window: Window, keys: Products) -> jax.Array:
    """`(I + L) U = diag(beta) (V - S_0 (exp(G_t) k_t))` solved by forward substitution, from the products of keys.

    Returns u_j over the length of k_j, `[T, R]`, which is what a stored key is multiplied by.
    """
    t = jnp.arange(window.beta.size, dtype=jnp.int32)
    weights = (window.beta * keys.unit)[:, None]
    lower = jnp.where(t[:, None] == t[None, :], 0, selected(keys.scores, weights * keys.unit[None, :]))
    right = window.beta[:, None] * window.v.astype(jnp.float32) - weights * keys.carried

    def solve(step, solved):
        here = (t == step)[:, None]
        known = jnp.sum(selected(jnp.sum(jnp.where(here, lower, 0), axis=0)[:, None], solved), axis=0)
        return solved - jnp.where(here, known[None, :], 0)

    return lax.fori_loop(1, window.num_tokens, solve, right) * keys.unit[:, None]
