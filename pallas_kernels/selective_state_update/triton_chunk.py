"""The chunked form as one Triton kernel, for sm_80 and later: a window, chain or tree, from one read of the state.

Grid, blocks, and what is moved are the step form's (`triton.py`), with tree masks besides; snapshots cost a product a
token. The sums over tokens and over N are matrix products on tensor cores, whose sides are at least 16: a window is
padded to a power of two with tokens that nobody sees, and a history is taken 16 tokens at a time. Precision: products
of float32 numbers in bfloat16 pieces, six partial products each, which leave errors of float32's size; the state is
rounded only where it is stored. Decays between two tokens are summed over the tokens between them, all of one sign, so
that nothing cancels.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.ring import Ring
from pallas_kernels.selective_state_update.arguments import StateUpdate
from pallas_kernels.selective_state_update.operands import Blocks, launch_fold, launch_update, path_mask
from pallas_kernels.selective_state_update.recurrence import SSMInputs
from pallas_kernels.selective_state_update.tile import History, Tile

_PIECES = 3  # bfloat16 numbers that hold the digits of a float32 one
_SIDE = 16  # the least side of a product, and the tokens of a history taken at once


class Tokens(NamedTuple):
    """Tokens as a tile sees them, in the dtypes they are stored in, all zero where none exists.

    Attributes:
        x: `[rows, tokens]`; dt: `[tokens]`; B: `[tokens, cols]`.
        exist: `[tokens]`.
    """

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    exist: jax.Array

    @property
    def weighted(self) -> jax.Array:
        """dt x, `[rows, tokens]` in float32."""
        return self.dt[None, :] * self.x.astype(jnp.float32)


def update(
    state: jax.Array,
    inputs: SSMInputs,
    A: jax.Array,
    D: jax.Array,
    *,
    parents: jax.Array | None,
    writes_state: bool,
    **options: Any,
) -> StateUpdate:
    """A chain or a tree; arguments as the reference's, and `interpret`."""
    _, T, G, _ = inputs.B.shape
    blocks = Blocks.of(state.shape[3], state.shape[4], least=_SIDE)
    padded = max(_SIDE, pl.next_power_of_2(T))

    def selective_state_update_chunk_kernel(reads, y_ref, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, G)
        A, D = reads.A[tile.head], reads.D[tile.head]
        t = jnp.arange(padded, dtype=jnp.int32)
        tokens = _read(tile, reads.inputs._asdict(), (tile.row, t), t < T)
        C = _load(reads.inputs.C, (tile.row, t), tile.group, tile.n, _grid(t < T, tile.n_mask))  # [tokens, cols]

        h = tile.load_state(reads.state if buffers.state is None else buffers.state)
        if buffers.ring is not None:
            history = tile.history(reads, buffers.ring["x"].shape[2])
            h = _replay(tile, history, buffers.ring, A, h)
            tile.store_state(buffers.state, tile.slot, h, where=tile.exists & reads.fold[tile.row])
            # Lanes without a token point past the ring, where no interpreter takes them for tokens of an earlier lap.
            entries = jnp.where(t < T, history.entry(history.size + t), history.length)
            _keep(tile, buffers.ring, entries, tokens)

        if reads.visible is None:
            visible = (t[:, None] <= t[None, :]).astype(jnp.float32)
        else:
            at = reads.visible.at[tile.row, t[None, :], t[:, None]]
            visible = triton.load(at, mask=_grid(t < T, t < T), other=0).astype(jnp.float32)
        decay, since_start = _decays(visible, tokens.dt * A)

        scores = _dot(tokens.B, C.T) * decay
        y = since_start[None, :] * _dot(h, C.T) + _dot(tokens.weighted, scores) + D * tokens.x.astype(jnp.float32)
        at = y_ref.at[tile.row, t[None, :], tile.head, tile.p[:, None]]
        triton.store(at, y.astype(y_ref.dtype), mask=_grid(tile.p_mask, t < T))

        def state_after(step):
            here = t == step
            weights = jnp.sum(jnp.where(here[None, :], decay, 0), axis=1)
            kept = jnp.sum(jnp.where(here, since_start, 0))
            return kept * h + _gained(tokens, weights)

        if buffers.snapshots is not None:
            lax.fori_loop(0, T, lambda i, _: tile.store_snapshot(buffers.snapshots, i, state_after(i)), None)
        if writes_state:
            tile.store_state(buffers.state, tile.slot, state_after(T - 1), where=tile.exists)

    return launch_update(
        selective_state_update_chunk_kernel,
        blocks,
        state,
        inputs,
        A,
        D,
        writes_state=writes_state,
        visible=None if parents is None else path_mask(parents),
        **options,
    )


def fold_history(state: jax.Array, ring: Ring, A: jax.Array, **options: Any) -> jax.Array:
    """Arguments as the reference's, and `interpret`."""
    blocks = Blocks.of(state.shape[3], state.shape[4], least=_SIDE)

    def fold_history_chunk_kernel(reads, _, buffers):
        tile = Tile.of_program(reads, blocks, state.shape, ring.inputs["B"].shape[3])
        history = tile.history(reads, ring.length)
        h = _replay(tile, history, reads.ring, reads.A[tile.head], tile.load_state(buffers.state))
        to_slot = reads.to_slots[tile.row]
        tile.store_state(buffers.state, to_slot, h, where=tile.exists & inside(to_slot, state.shape[1]))

    return launch_fold(fold_history_chunk_kernel, blocks, state, ring, A, **options)


def _replay(tile: Tile, history: History, ring_refs: Any, A: jax.Array, h: jax.Array) -> jax.Array:
    """The state after the history, in float32."""
    i = jnp.arange(_SIDE, dtype=jnp.int32)

    def step(chunk, h):
        behind = chunk * _SIDE + i
        tokens = _read(tile, ring_refs, (tile.layer, tile.slot, history.entry(behind)), behind < history.size)
        a = tokens.dt * A
        to_end = jnp.sum(jnp.where(i[:, None] > i[None, :], a[:, None], 0), axis=0)
        return jnp.exp(jnp.sum(a)) * h + _gained(tokens, jnp.exp(to_end))

    return lax.fori_loop(0, lax.div(history.size + _SIDE - 1, jnp.int32(_SIDE)), step, h)


def _decays(visible: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From each token (axis 0) to each that sees it (axis 1), 0 where none does; and from the start to each token.

    Args:
        visible: `[tokens, tokens]`, 1 where axis 0 is on the path to axis 1, else 0.
        a: `[tokens]` dt A.
    """
    t = jnp.arange(a.size, dtype=jnp.int32)
    on_path = visible * a[:, None]
    below = jnp.where(t[:, None] == t[None, :], 0, visible).astype(jnp.bfloat16)
    between = _dot(below, on_path)  # of the tokens on the path to axis 1, those that see axis 0 and are not it
    return visible * jnp.exp(between), jnp.exp(jnp.sum(on_path, axis=0))


def _gained(tokens: Tokens, weights: jax.Array) -> jax.Array:
    """`sum_j weights_j dt_j x_j B_j^T`, `[rows, cols]`."""
    return _dot(weights[None, :] * tokens.weighted, tokens.B)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """A product on tensor cores with errors of float32's size: in bfloat16 pieces, the smallest products first."""
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return lax.dot(a, b, preferred_element_type=jnp.float32)
    products = [
        lax.dot(x, y, preferred_element_type=jnp.float32)
        for size in reversed(range(_PIECES))
        for i, x in enumerate(_pieces(a))
        for j, y in enumerate(_pieces(b))
        if i + j == size
    ]
    return functools.reduce(operator.add, products)


def _pieces(values: jax.Array) -> list[jax.Array]:
    """bfloat16 numbers that add up to the values: their leading digits, then the next ones."""
    if values.dtype == jnp.bfloat16:
        return [values]
    pieces, rest = [], values.astype(jnp.float32)
    for _ in range(_PIECES):
        # Cut off rather than rounded: a compiler may drop a conversion there and back, which would leave no rest.
        leading = lax.bitcast_convert_type(lax.bitcast_convert_type(rest, jnp.int32) & -0x10000, jnp.float32)
        pieces.append(leading.astype(jnp.bfloat16))
        rest = rest - leading
    return pieces


def _read(tile: Tile, refs: dict[str, Any], at: tuple[jax.Array, ...], exist: jax.Array) -> Tokens:
    """Tokens of `[..., tokens, H, P]` arrays, the last of `at` being `[tokens]`."""
    *where, tokens = at
    return Tokens(
        x=triton.load(
            refs["x"].at[(*where, tokens[None, :], tile.head, tile.p[:, None])],
            mask=_grid(tile.p_mask, exist),
            other=0,
        ),
        dt=triton.load(refs["dt"].at[(*at, tile.head)], mask=exist, other=0),
        B=_load(refs["B"], at, tile.group, tile.n, _grid(exist, tile.n_mask)),
        exist=exist,
    )


def _load(ref: Any, at: tuple[jax.Array, ...], group: jax.Array, columns: jax.Array, mask: jax.Array) -> jax.Array:
    """`[tokens, columns]` of one group."""
    *where, tokens = at
    return triton.load(ref.at[(*where, tokens[:, None], group, columns[None, :])], mask=mask, other=0)


def _keep(tile: Tile, ring_refs: dict[str, Any], entries: jax.Array, tokens: Tokens) -> None:
    """Writes the tile's share of the tokens into the ring."""
    at, exist = (tile.layer, tile.slot), tokens.exist

    @pl.when(tile.exists)
    def _():
        x_at = ring_refs["x"].at[(*at, entries[None, :], tile.head, tile.p[:, None])]
        triton.store(x_at, tokens.x, mask=_grid(tile.p_mask, exist))

    @pl.when(tile.exists & tile.first)
    def _():
        triton.store(ring_refs["dt"].at[(*at, entries, tile.head)], tokens.dt, mask=exist)

    @pl.when(tile.exists & tile.leads)
    def _():
        B_at = ring_refs["B"].at[(*at, entries[:, None], tile.group, tile.n[None, :])]
        triton.store(B_at, tokens.B, mask=_grid(exist, tile.n_mask))


def _grid(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A mask of both sides; None is all of one."""
    everywhere = jnp.full((1, 1), True)
    return (everywhere if rows is None else rows[:, None]) & (everywhere if columns is None else columns[None, :])
