"""The op as one Triton kernel, for sm_80 and later.

Grid `(chunks, B, L)`: a program moves one chunk of one entry's state in one layer, to its live slot and to its tracked
one; the chunks of all leaves are numbered through. Block: 16 KiB of one leaf, so that 4 warps have eight 128-bit loads
a thread in flight, or the whole state where it is smaller. Bytes moved: each written state read once and written once,
which is the least possible; skipped entries read their indices only. Precision: bits are moved, nothing is computed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Indices
from pallas_kernels.compat import triton
from pallas_kernels.entries import Entry, read_entry
from pallas_kernels.launch import THREADS, result_shapes

_BLOCK_BYTES = 16 * 1024
NUM_WARPS = 4


class Chunks(NamedTuple):
    """A leaf's share of the grid: chunk ids `first .. first + number - 1`, each `block` elements of `size`."""

    first: int
    number: int
    block: int
    size: int

    def start(self, chunk: jax.Array) -> jax.Array:
        """The first element of a chunk."""
        return (chunk - self.first) * self.block

    def holds(self, chunk: jax.Array) -> jax.Array:
        """Whether a chunk belongs to this leaf."""
        return (chunk >= self.first) & (chunk < self.first + self.number)

    def mask(self, chunk: jax.Array) -> jax.Array | None:
        """Which elements of a chunk exist; None where all do."""
        if self.size % self.block == 0:
            return None
        return self.start(chunk) + jnp.arange(self.block, dtype=jnp.int32) < self.size


def scatter(pools: list[jax.Array], states: list[jax.Array], indices: Indices, *, interpret: bool) -> list[jax.Array]:
    """The pools `[L, S, X]` with both index sets written from the states `[L, R, T, X]`."""
    check_offsets("state_scatter", pools + states)
    chunks = split([(pool.shape[2], block_of(pool)) for pool in pools])
    (num_slots,), (num_rows, num_steps) = pools[0].shape[1:2], states[0].shape[1:3]

    def state_scatter_kernel(index_refs, state_refs, _, pool_refs):
        chunk, i, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        entry = read_entry(index_refs, i, num_slots, num_rows, num_steps, needs_slot=False)
        for part, pool_ref, state_ref in zip(chunks, pool_refs, state_refs, strict=True):
            pl.when(part.holds(chunk))(functools.partial(copy_chunk, part, chunk, layer, entry, pool_ref, state_ref))

    grid = (chunks[-1].first + chunks[-1].number, indices.slots.size, pools[0].shape[0])
    return launch(state_scatter_kernel, grid, indices, states, pools, interpret)


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    inputs: Any,
    sources: list[jax.Array],
    pools: list[jax.Array],
    interpret: bool,
) -> list[jax.Array]:
    """One launch of `kernel(input refs, source refs, _, pool refs)`, each a pytree; the pools are updated in place."""
    before = len(jax.tree.leaves((inputs, sources)))

    def flat_kernel(*refs):
        arguments = jax.tree.unflatten(jax.tree.structure((inputs, sources, pools)), refs[: before + len(pools)])
        kernel(*arguments, refs[before + len(pools) :])

    flat_kernel.__name__ = kernel.__name__
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        flat_kernel,
        grid=grid,
        in_specs=[anywhere] * (before + len(pools)),
        out_specs=[anywhere] * len(pools),
        out_shape=result_shapes(pools, jax.tree.leaves((inputs, sources, pools))),
        input_output_aliases={before + i: i for i in range(len(pools))},
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
    )(*jax.tree.leaves((inputs, sources, pools)))


def copy_chunk(part: Chunks, chunk: jax.Array, layer: jax.Array, entry: Entry, pool_ref: Any, state_ref: Any) -> None:
    """Moves one chunk of a state to the entry's slots."""
    at, mask = pl.ds(part.start(chunk), part.block), part.mask(chunk)

    def move(slot, step):
        values = triton.load(state_ref.at[layer, entry.row, step, at], mask=mask)
        triton.store(pool_ref.at[layer, slot, at], values, mask=mask)

    for target in entry.targets:
        pl.when(target.valid)(functools.partial(move, target.slot, target.step))


def split(leaves: list[tuple[int, int]]) -> list[Chunks]:
    """Numbers the chunks of leaves given as (size, block).

    A chunk has an element for each thread at least, masked where the leaf has none: a window is formed in place, so no
    two threads may hold one channel (`launch.fitting_warps`).
    """
    chunks, first = [], 0
    for size, block in leaves:
        block = min(block, max(pl.next_power_of_2(size), NUM_WARPS * THREADS))
        count = pl.cdiv(size, block)
        chunks.append(Chunks(first, count, block, size))
        first += count
    return chunks


def block_of(array: jax.Array) -> int:
    """Elements of a block that moves a leaf."""
    return _BLOCK_BYTES // array.dtype.itemsize


def check_offsets(op: str, arrays: list[jax.Array]) -> None:
    """Refuses arrays whose offsets the Triton backend would compute in 32 bits and overflow.

    It decides by bytes (64-bit past 2**32 of them) while it counts in elements, so arrays of one-byte elements between
    2**31 and 2**32 bytes would be addressed wrongly.
    """
    for array in arrays:
        if array.size > 2**31 and array.size * array.dtype.itemsize <= 2**32:
            raise NotImplementedError(
                f"{op}: the Triton backend computes wrong offsets in a {array.dtype} array of {array.size} elements, "
                "between 2**31 and 2**32 bytes; pass implementation='xla', or split or enlarge the pool"
            )
