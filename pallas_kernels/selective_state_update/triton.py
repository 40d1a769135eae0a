"""The step form as one Triton kernel, for sm_80 and later: decode, snapshots, replay from a ring, fold.

Grid `(P / 32, H, B)`: a program keeps 32 rows of one head's state in registers, 32 numbers a thread, and takes the
history's tokens, then the window's, one after the other; heads of a group follow each other, so that what they share
is read from L2. Of a tree a program keeps the first state alone, and comes to each node along its path from there: one
step more an ancestor, and no bytes. Bytes moved: the state read once, and written once where the pass writes it;
snapshots written once; x, dt, B, C and the history's x, dt, B read once from memory (B and C again from L2 by each tile
of a group); y and the ring's new entries written once. The least possible, but for a history that could have been
folded before. Precision: float32; the state is rounded to its storage dtype after every token. The compiler rounds
every product before it adds (`tests/aot` looks for fused ones), so a token has the same bits in every pass.

All programs of a row share the ring's dt and B, and no program waits for another. That is safe because the entries that
a pass writes follow the history in the ring's order, a permutation that no kernel changes, so that none of its
programs reads them (`ring.must_fold` keeps room), and each is written by one program: dt by its head's first, B by its
group's first.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.history import History
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.selective_state_update.operands import Blocks, Reads, launch_fold, launch_update
from pallas_kernels.selective_state_update.recurrence import Mamba2
from pallas_kernels.selective_state_update.tile import Tile, load


class Token(NamedTuple):
    """One token as a tile sees it, in float32: x `[rows]`, dt, B `[cols]`."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array


def update(rule: Mamba2, call: Pass, *, interpret: bool) -> StateUpdate:
    """A chain or a tree."""
    state, writes_state, (_, T, G, _) = call.state, call.writes_state, call.inputs.B.shape
    blocks = _blocks(state)

    def selective_state_update_kernel(reads, y_ref, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, G)
        A, D = reads.A[tile.head], reads.D[tile.head]
        h = tile.load_state(reads.state if buffers.state is None else buffers.state)
        history = None
        if buffers.ring is not None:
            history = tile.history(reads)
            h = _replay(tile, history, buffers.ring, A, h, state.dtype)
            tile.store_state(buffers.state, tile.slot, h, where=tile.exists & reads.fold[tile.row])

        def step(t, h):
            # Loaded after its ancestors were replayed, to free registers.
            before = h if reads.visible is None else _up_to(tile, t, reads, A, h, state.dtype)
            token = _read_token(tile, reads.inputs._asdict(), (tile.row, t))
            C = load(reads.inputs.C.at[tile.row, t, tile.group, tile.n], tile.n_mask)
            after = _state_step(before, token, A)
            y = jnp.sum(after * C[None, :], axis=1) + D * token.x
            triton.store(y_ref.at[tile.row, t, tile.head, tile.p], y.astype(y_ref.dtype), mask=tile.p_mask)
            if buffers.snapshots is not None:
                tile.store_snapshot(buffers.snapshots, t, after)
            if history is not None:
                _keep_token(tile, history.entry(history.size + t), buffers.ring, token)
            return _as_stored(after, state.dtype) if reads.visible is None else h

        h = lax.fori_loop(0, T, step, h)
        if writes_state:
            tile.store_state(buffers.state, tile.slot, h, where=tile.exists)

    return launch_update(selective_state_update_kernel, blocks, rule, call, interpret=interpret)


def fold_history(rule: Mamba2, call: Fold, *, interpret: bool) -> jax.Array:
    """The pool with the states after the first inputs of each row's ring."""
    state, blocks = call.state, _blocks(call.state)
    groups = call.ring.inputs["B"].shape[3]

    def fold_history_kernel(reads, _, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, groups)
        history = tile.history(reads)
        h = _replay(tile, history, reads.ring, reads.A[tile.head], tile.load_state(buffers.state), state.dtype)
        to_slot = reads.to_slots[tile.row]
        tile.store_state(buffers.state, to_slot, h, where=tile.exists & inside(to_slot, state.shape[1]))

    return launch_fold(fold_history_kernel, blocks, rule, call, interpret=interpret)


def _blocks(state: jax.Array) -> Blocks:
    _, _, _, P, N = state.shape
    return Blocks.of(P, N, least=1, most=None, numbers=32)


def _state_step(h: jax.Array, token: Token, A: jax.Array) -> jax.Array:
    """One token; every pass advances a state by this."""
    decay = jnp.exp(token.dt * A)
    added = (token.dt * token.x)[:, None] * token.B[None, :]
    return jnp.where(token.dt == 0, h, h * decay + added)  # no token there, whatever x and B hold


def _as_stored(h: jax.Array, dtype: Any) -> jax.Array:
    """What reading the state back from a pool would give."""
    return h.astype(dtype).astype(jnp.float32)


def _replay(tile: Tile, history: History, ring_refs: Any, A: jax.Array, h: jax.Array, dtype: Any) -> jax.Array:
    """The state after the history, as it would have been stored."""

    def step(i, h):
        token = _read_token(tile, ring_refs, (tile.layer, tile.slot, history.entry(i)))
        return _as_stored(_state_step(h, token, A), dtype)

    return lax.fori_loop(0, history.size, step, h)


def _up_to(tile: Tile, t: jax.Array, reads: Reads, A: jax.Array, h: jax.Array, dtype: Any) -> jax.Array:
    """The state of a node's parent, as it would have been stored: h advanced along the path."""

    def step(j, h):
        def advance(h):
            token = _read_token(tile, reads.inputs._asdict(), (tile.row, j))
            return _as_stored(_state_step(h, token, A), dtype)

        return lax.cond(reads.visible[tile.row, t, j] != 0, advance, lambda h: h, h)

    return lax.fori_loop(0, t, step, h)


def _read_token(tile: Tile, refs: dict[str, Any], at: tuple[jax.Array, ...]) -> Token:
    return Token(
        x=load(refs["x"].at[(*at, tile.head, tile.p)], tile.p_mask),
        dt=refs["dt"][(*at, tile.head)],
        B=load(refs["B"].at[(*at, tile.group, tile.n)], tile.n_mask),
    )


def _keep_token(tile: Tile, entry: jax.Array, ring_refs: dict[str, Any], token: Token) -> None:
    """Writes the tile's share of a token into the ring."""
    at = (tile.layer, tile.slot, entry)

    @pl.when(tile.exists)
    def _():
        x_ref = ring_refs["x"]
        triton.store(x_ref.at[(*at, tile.head, tile.p)], token.x.astype(x_ref.dtype), mask=tile.p_mask)

    @pl.when(tile.exists & tile.first)
    def _():
        ring_refs["dt"][(*at, tile.head)] = token.dt

    @pl.when(tile.exists & tile.leads)
    def _():
        B_ref = ring_refs["B"]
        triton.store(B_ref.at[(*at, tile.group, tile.n)], token.B.astype(B_ref.dtype), mask=tile.n_mask)
