"""The op as one Mosaic GPU kernel, for sm_90 and sm_100.

Grid `(chunks, B, L)`: a program, one warpgroup, brings one chunk of one entry's state in one layer to its live slot and
its tracked one; the chunks of all SSM leaves, then of all conv leaves, are numbered through. Blocks: 16 KiB of an SSM
leaf (see `state_scatter/mosaic_gpu.py`); 2 KiB of a conv leaf's channels, one access a thread, with all W-1 columns. No
two blocks share a channel, so a program has read all that it needs of the slot before it writes there: windows are
formed in place. Bytes moved: SSM states read once and written once; windows written once, old windows read once, and
for each set W-1 inputs, needed or not, as there are no masks: up to 2 (W-1) C elements an entry and layer more than the
least possible, under 1 % of a state. Precision: bits are moved, nothing is computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Indices
from pallas_kernels.entries import Entry, read_entry
from pallas_kernels.state_commit.window import earlier, taps
from pallas_kernels.state_scatter.mosaic_gpu import (
    ACCESSES,
    GRID,
    Piece,
    copy_chunk,
    each_access,
    launch,
    load,
    split,
    store,
)


def commit(
    ssm: list[jax.Array],
    conv: list[jax.Array],
    ssm_states: list[jax.Array],
    conv_inputs: list[jax.Array],
    parents: jax.Array | None,
    indices: Indices,
    *,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The pools with live and tracked states and windows written; SSM `[L, S, X]`, conv `[L, S, W-1, C]`."""
    pools, sources = ssm + conv, ssm_states + conv_inputs
    moved = [(pool.shape[2], pool.dtype.itemsize, ACCESSES) for pool in ssm]
    pieces, chunks = split(moved + [(pool.shape[3], pool.dtype.itemsize, 1) for pool in conv])
    (num_layers, num_slots), (num_rows, num_steps) = pools[0].shape[:2], sources[0].shape[1:3]

    def state_commit_kernel(input_refs, source_refs, pool_refs):
        index_refs, parents_ref = input_refs
        chunk, i, layer = (lax.axis_index(name) for name in GRID)
        entry = read_entry(index_refs, i, num_slots, num_rows, num_steps, needs_slot=True)

        def parent_of(node):
            return node - 1 if parents_ref is None else earlier(parents_ref[i, node], node)

        for leaf, (parts, pool_ref, source_ref) in enumerate(zip(pieces, pool_refs, source_refs, strict=True)):
            move = copy_chunk if leaf < len(ssm) else functools.partial(_form_windows, parent_of)
            for part in parts:
                pl.when(part.holds(chunk))(functools.partial(move, part, chunk, layer, entry, pool_ref, source_ref))

    grid = (chunks, indices.slots.size, num_layers)
    written = launch(state_commit_kernel, grid, (indices, parents), sources, pools, interpret)
    return written[: len(ssm)], written[len(ssm) :]


def _form_windows(
    parent_of: Any, part: Piece, chunk: jax.Array, layer: jax.Array, entry: Entry, pool_ref: Any, input_ref: Any
) -> None:
    """Forms every window of some channels, then stores them."""
    width = pool_ref.shape[2]

    def window(at, old, where):
        columns = []
        for tap in where:
            column = load(part, input_ref.at[layer, entry.row, jnp.maximum(tap - width, 0)], at)
            for k in range(width):
                column = jnp.where(tap == k, old[k], column)
            columns.append(column)
        return columns

    def store_window(at, slot, columns):
        for j, column in enumerate(columns):
            store(part, pool_ref.at[layer, slot, j], at, column)

    def form_and_store():
        wheres = [taps(jnp.where(target.valid, target.step, 0), parent_of, width) for target in entry.targets]

        def form(at):
            old = [load(part, pool_ref.at[layer, entry.slot, k], at) for k in range(width)]
            windows = [window(at, old, where) for where in wheres]
            for target, columns in zip(entry.targets, windows, strict=True):
                pl.when(target.valid)(functools.partial(store_window, at, target.slot, columns))

        each_access(part, chunk, form)

    pl.when(entry.writes)(form_and_store)
