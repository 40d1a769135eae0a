"""The chunked form as one Triton kernel, for sm_80 and later: a window, chain or tree, from one read of the state.

Grid `(P / 32, H, B)`, as the step form's (`triton.py`): a program takes 32 rows of one head's state, 32 columns at a
time, 16 numbers a thread. Bytes moved are the step form's too, with a tree's masks besides; x and dt of the history are
read from L1 again for each stretch of columns. The sums over tokens and over N are products on tensor cores, whose
sides are at least 16: a window is padded to a power of two with tokens that nobody sees, and a history is taken 16
tokens at a time. Precision: products of float32 numbers in bfloat16 pieces that leave errors of float32's size; the
state is rounded only where it is stored. The decay between two tokens is summed over the tokens between them, all of
one sign, so that nothing cancels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.chunked import SIDE, decays, dot, grid, visible_tokens
from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.history import History
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.selection import finite, is_finite, some
from pallas_kernels.selective_state_update.operands import Blocks, launch_fold, launch_update
from pallas_kernels.selective_state_update.recurrence import Mamba2
from pallas_kernels.selective_state_update.tile import Tile

_COLUMNS = 32  # of N at once, so that the state and its pieces fit into registers


class Tokens(NamedTuple):
    """Tokens as a tile sees them, in the dtypes they are stored in, all zero where none exists.

    Attributes:
        x: `[rows, tokens]`; dt: `[tokens]`.
        at: where they are in arrays `[..., tokens, H or G, ...]`, the last of it `[tokens]`.
        exist: `[tokens]`.
    """

    x: jax.Array
    dt: jax.Array
    at: tuple[jax.Array, ...]
    exist: jax.Array

    @classmethod
    def of(cls, tile: Tile, refs: dict[str, Any], at: tuple[jax.Array, ...], exist: jax.Array) -> "Tokens":
        """Tokens read from refs of x and dt."""
        *where, tokens = at
        x_at = refs["x"].at[(*where, tokens[None, :], tile.head, tile.p[:, None])]
        return cls(
            x=triton.load(x_at, mask=grid(tile.p_mask, exist), other=0),
            dt=triton.load(refs["dt"].at[(*at, tile.head)], mask=exist, other=0),
            at=at,
            exist=exist,
        )

    def load(self, tile: Tile, ref: Any) -> jax.Array:
        """The tile's columns of B or C, `[tokens, cols]`."""
        *where, tokens = self.at
        at = ref.at[(*where, tokens[:, None], tile.group, tile.n[None, :])]
        return triton.load(at, mask=grid(self.exist, tile.n_mask), other=0)

    @property
    def weighted(self) -> jax.Array:
        """dt x, `[rows, tokens]` in float32."""
        return self.dt[None, :] * self.x.astype(jnp.float32)


def update(rule: Mamba2, call: Pass, *, interpret: bool) -> StateUpdate:
    """A chain or a tree."""
    state, writes_state, (_, T, G, _) = call.state, call.writes_state, call.inputs.B.shape
    # With a ring a program holds a stretch of history besides.
    blocks = _blocks(state) if call.ring is None else _blocks(state, numbers=8)
    padded = max(SIDE, pl.next_power_of_2(T))

    def selective_state_update_chunk_kernel(reads, y_ref, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, G)
        A, D = reads.A[tile.head], reads.D[tile.head]
        t = jnp.arange(padded, dtype=jnp.int32)
        window = Tokens.of(tile, reads.inputs._asdict(), (tile.row, t), t < T)
        history = None
        if buffers.ring is not None:
            history = tile.history(reads)
            # Lanes without a token point past the ring, where no interpreter takes them for tokens of an earlier lap.
            entries = jnp.where(window.exist, history.entry(history.size + t), history.length)
            _keep_x_and_dt(tile, buffers.ring, entries, window)
        decay, since_start = decays(visible_tokens(reads.visible, tile.row, t, T), window.dt * A)
        # Weights of 0 do not take back what is not finite: it is left out below, and the tokens that see it are NaN.
        spoilt = some(~is_finite(window.weighted), axis=0)
        decay = jnp.where((decay != 0) & spoilt[:, None], jnp.nan, decay)

        def state_after(step, h, B):
            here = t == step
            weights = jnp.sum(jnp.where(here[None, :], decay, 0), axis=1)
            kept = jnp.sum(jnp.where(here, since_start, 0))
            seen = (weights != 0) & (window.dt != 0)  # others may hold what is not finite: it is not multiplied by 0
            weighted = jnp.where(seen[None, :], weights[None, :] * window.weighted, 0)
            return kept * h + dot(weighted, jnp.where(seen[:, None], B, 0))

        def take_columns(part, sums):
            carried, scores = sums
            columns = tile.columns(part)
            B, C = window.load(columns, reads.inputs.B), window.load(columns, reads.inputs.C)
            h = columns.load_state(reads.state if buffers.state is None else buffers.state)
            if history is not None:
                h = _replay(columns, history, buffers.ring, A, h)
                columns.store_state(buffers.state, tile.slot, h, where=tile.exists & reads.fold[tile.row])
                _keep_B(columns, buffers.ring, entries, window, B)
            carried, scores = carried + dot(h, C.T), scores + dot(B, C.T)
            if buffers.snapshots is not None:  # once C's registers are free
                lax.fori_loop(
                    0, T, lambda i, _: columns.store_snapshot(buffers.snapshots, i, state_after(i, h, B)), None
                )
            if writes_state:
                columns.store_state(buffers.state, tile.slot, state_after(T - 1, h, B), where=tile.exists)
            return carried, scores

        zeros = jnp.zeros((blocks.rows, padded), jnp.float32), jnp.zeros((padded, padded), jnp.float32)
        carried, scores = lax.fori_loop(0, pl.cdiv(tile.state, blocks.cols), take_columns, zeros)
        scores = jnp.where(decay != 0, scores * decay, 0)
        y = since_start[None, :] * carried + dot(finite(window.weighted), scores) + D * window.x.astype(jnp.float32)
        at = y_ref.at[tile.row, t[None, :], tile.head, tile.p[:, None]]
        triton.store(at, y.astype(y_ref.dtype), mask=grid(tile.p_mask, window.exist))

    return launch_update(selective_state_update_chunk_kernel, blocks, rule, call, interpret=interpret)


def fold_history(rule: Mamba2, call: Fold, *, interpret: bool) -> jax.Array:
    """The pool with the states after the first inputs of each row's ring."""
    state, blocks = call.state, _blocks(call.state, numbers=32)  # a window's registers are free
    groups = call.ring.inputs["B"].shape[3]

    def fold_history_chunk_kernel(reads, _, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, groups)
        history, A, to_slot = tile.history(reads), reads.A[tile.head], reads.to_slots[tile.row]

        def take_columns(part, _):
            columns = tile.columns(part)
            h = _replay(columns, history, reads.ring, A, columns.load_state(buffers.state))
            columns.store_state(buffers.state, to_slot, h, where=tile.exists & inside(to_slot, state.shape[1]))

        lax.fori_loop(0, pl.cdiv(tile.state, blocks.cols), take_columns, None)

    return launch_fold(fold_history_chunk_kernel, blocks, rule, call, interpret=interpret)


def _blocks(state: jax.Array, numbers: int = 16) -> Blocks:
    _, _, _, P, N = state.shape
    return Blocks.of(P, N, least=SIDE, most=_COLUMNS, numbers=numbers)


def _replay(tile: Tile, history: History, ring_refs: Any, A: jax.Array, h: jax.Array) -> jax.Array:
    """The state after the history, in float32."""
    i = jnp.arange(SIDE, dtype=jnp.int32)

    def step(chunk, h):
        behind = chunk * SIDE + i
        tokens = Tokens.of(tile, ring_refs, (tile.layer, tile.slot, history.entry(behind)), behind < history.size)
        a = tokens.dt * A
        to_end = jnp.sum(jnp.where(i[:, None] > i[None, :], a[:, None], 0), axis=0)
        return jnp.exp(jnp.sum(a)) * h + _gained(tokens, jnp.exp(to_end), tokens.load(tile, ring_refs["B"]))

    return lax.fori_loop(0, lax.div(history.size + SIDE - 1, jnp.int32(SIDE)), step, h)


def _gained(tokens: Tokens, weights: jax.Array, B: jax.Array) -> jax.Array:
    """`sum_j weights_j dt_j x_j B_j^T`, `[rows, cols]`."""
    return dot(weights[None, :] * tokens.weighted, B)


def _keep_x_and_dt(tile: Tile, ring_refs: dict[str, Any], entries: jax.Array, tokens: Tokens) -> None:
    """Writes the tile's share of them into the ring."""

    @pl.when(tile.exists)
    def _():
        at = ring_refs["x"].at[tile.layer, tile.slot, entries[None, :], tile.head, tile.p[:, None]]
        triton.store(at, tokens.x, mask=grid(tile.p_mask, tokens.exist))

    @pl.when(tile.exists & tile.first)
    def _():
        triton.store(ring_refs["dt"].at[tile.layer, tile.slot, entries, tile.head], tokens.dt, mask=tokens.exist)


def _keep_B(tile: Tile, ring_refs: dict[str, Any], entries: jax.Array, tokens: Tokens, B: jax.Array) -> None:
    """Writes the tile's columns of B into the ring, for its whole group."""

    @pl.when(tile.exists & tile.leads)
    def _():
        at = ring_refs["B"].at[tile.layer, tile.slot, entries[:, None], tile.group, tile.n[None, :]]
        triton.store(at, B, mask=grid(tokens.exist, tile.n_mask))
