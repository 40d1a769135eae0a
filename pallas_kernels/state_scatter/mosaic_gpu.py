"""The op as one Mosaic GPU kernel, for sm_90 and sm_100.

Grid `(chunks, B, L)`: a program, one warpgroup, moves one chunk of one entry's state in one layer, to its live slot and
to its tracked one; the chunks of all leaves are numbered through. Block: 16 KiB of one leaf, eight 128-bit accesses a
thread; what a leaf has left over is split into smaller blocks, and fewer than 128 elements go one by one, as there are
no masks. Bytes moved: each written state read once and written once, which is the least possible. Precision: bits are
moved, nothing is computed.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Indices
from pallas_kernels.compat import mosaic_gpu, mosaic_interpreter
from pallas_kernels.entries import Entry, read_entry

_THREADS = 128
_ACCESS_BYTES = 16
ACCESSES = 8  # a thread and block: 16 KiB


class Piece(NamedTuple):
    """A leaf's elements `offset .. offset + number * block - 1` as chunk ids `first .. first + number - 1`.

    vector: elements of one access; 0 where the block's elements go one by one.
    """

    first: int
    number: int
    offset: int
    block: int
    vector: int

    def holds(self, chunk: jax.Array) -> jax.Array:
        """Whether a chunk belongs to this piece."""
        return (chunk >= self.first) & (chunk < self.first + self.number)

    def start(self, chunk: jax.Array) -> jax.Array:
        """The first element of a chunk."""
        return self.offset + (chunk - self.first) * self.block


def scatter(pools: list[jax.Array], states: list[jax.Array], indices: Indices, *, interpret: bool) -> list[jax.Array]:
    """The pools `[L, S, X]` with both index sets written from the states `[L, R, T, X]`."""
    pieces, chunks = split([(pool.shape[2], pool.dtype.itemsize, ACCESSES) for pool in pools])
    num_slots, (num_rows, num_steps) = pools[0].shape[1], states[0].shape[1:3]

    def state_scatter_kernel(index_refs, state_refs, pool_refs):
        chunk, i, layer = (lax.axis_index(name) for name in GRID)
        entry = read_entry(index_refs, i, num_slots, num_rows, num_steps, needs_slot=False)
        for parts, pool_ref, state_ref in zip(pieces, pool_refs, state_refs, strict=True):
            for part in parts:
                pl.when(part.holds(chunk))(
                    functools.partial(copy_chunk, part, chunk, layer, entry, pool_ref, state_ref)
                )

    return launch(
        state_scatter_kernel, (chunks, indices.slots.size, pools[0].shape[0]), indices, states, pools, interpret
    )


GRID = ("chunk", "entry", "layer")


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    inputs: Any,
    sources: list[jax.Array],
    pools: list[jax.Array],
    interpret: bool,
) -> list[jax.Array]:
    """One launch of `kernel(input refs, source refs, pool refs)`, each a pytree; the pools are updated in place."""
    structure = jax.tree.structure((inputs, sources, pools))

    def flat_kernel(*refs):
        kernel(*jax.tree.unflatten(structure, refs))

    pool_refs = [jax.new_ref(pool) for pool in pools]
    # What mosaic_gpu.kernel calls; its wrapper refuses refs made inside jit on jax 0.10.
    pl.kernel(
        flat_kernel,
        out_type=(),
        mesh=mosaic_gpu.Mesh(grid=grid, grid_names=GRID),
        compiler_params=mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane),
        interpret=mosaic_interpreter() if interpret else False,
        name=kernel.__name__,
    )(*jax.tree.leaves((inputs, sources)), *pool_refs)
    return [ref[...] for ref in pool_refs]


def copy_chunk(part: Piece, chunk: jax.Array, layer: jax.Array, entry: Entry, pool_ref: Any, state_ref: Any) -> None:
    """Moves one chunk of a state to the entry's slots."""

    def move(slot, step):
        def move_at(at):
            store(part, pool_ref.at[layer, slot], at, load(part, state_ref.at[layer, entry.row, step], at))

        each_access(part, chunk, move_at)

    for target in entry.targets:
        pl.when(target.valid)(functools.partial(move, target.slot, target.step))


def each_access(part: Piece, chunk: jax.Array, body: Callable) -> None:
    """Calls `body(start)` once for a block of vectors, for every element of a block without."""
    start = part.start(chunk)
    if part.vector:
        body(start)
    else:
        lax.fori_loop(0, part.block, lambda n, _: body(start + n), None)


def load(part: Piece, ref: Any, at: jax.Array) -> jax.Array:
    """The block, or the one element, at `at` of a 1-D ref."""
    if not part.vector:
        return ref[at]
    layout = mosaic_gpu.Layout.WG_STRIDED((part.block,), vec_size=part.vector)
    return mosaic_gpu.layout_cast(ref[pl.ds(at, part.block)], layout)


def store(part: Piece, ref: Any, at: jax.Array, values: jax.Array) -> None:
    """Stores what `load` returned, or what was formed of it."""
    ref[pl.ds(at, part.block) if part.vector else at] = values


def split(leaves: list[tuple[int, int, int]]) -> tuple[list[list[Piece]], int]:
    """Numbers the chunks of leaves given as (size, bytes an element, accesses a thread and block).

    Returns each leaf's pieces, and how many chunks there are.
    """
    pieces, first = [], 0
    for size, itemsize, accesses in leaves:
        # A row of the pool starts at a multiple of its size, so an access may not be wider than what divides that.
        widest = math.gcd(size, _ACCESS_BYTES // itemsize)
        block, offset, parts = _THREADS * widest * accesses, 0, []
        while offset < size:
            vector = min(widest, block // _THREADS)
            number = (size - offset) // block if vector else 1
            if number:
                parts.append(Piece(first, number, offset, block if vector else size - offset, vector))
                first += number
                offset += number * block
            block //= 2
        pieces.append(parts)
    return pieces, first
