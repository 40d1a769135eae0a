"""The op as one Triton kernel, for sm_80 and later.

Grid `(chunks, B, L)`: a program brings one chunk of one entry's state in one layer to its live slot and its tracked
one; the chunks of all SSM leaves, then of all conv leaves, are numbered through. Blocks: 16 KiB of an SSM leaf (see
`state_scatter/triton.py`); of a conv leaf 1024 channels with all W-1 columns, so that a thread owns whole channels and
has read everything it needs of the slot before it writes there: windows are formed in place. Bytes moved: SSM states
and the inputs on the path read once, states and windows written once, old windows read once; the least possible, but
for old columns that the new windows do not keep. Precision: bits are moved, nothing is computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.arguments import Indices
from pallas_kernels.compat import triton
from pallas_kernels.entries import read_entry
from pallas_kernels.state_commit.window import earlier, taps
from pallas_kernels.state_scatter.triton import block_of, check_offsets, copy_chunk, launch, split

_BLOCK_CHANNELS = 1024


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
    check_offsets("state_commit", pools + sources)
    chunks = split([(p.shape[2], block_of(p)) for p in ssm] + [(p.shape[3], _BLOCK_CHANNELS) for p in conv])
    (num_layers, num_slots), (num_rows, num_steps) = pools[0].shape[:2], sources[0].shape[1:3]

    def state_commit_kernel(input_refs, source_refs, _, pool_refs):
        index_refs, parents_ref = input_refs
        chunk, i, layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        entry = read_entry(index_refs, i, num_slots, num_rows, num_steps, needs_slot=True)

        def parent_of(node):
            return node - 1 if parents_ref is None else earlier(parents_ref[i, node], node)

        for leaf, (part, pool_ref, source_ref) in enumerate(zip(chunks, pool_refs, source_refs, strict=True)):
            place = part, chunk, layer, entry, pool_ref, source_ref
            if leaf < len(ssm):
                pl.when(part.holds(chunk))(functools.partial(copy_chunk, *place))
            else:
                pl.when(part.holds(chunk))(functools.partial(_form_windows, parent_of, *place))

    grid = (chunks[-1].first + chunks[-1].number, indices.slots.size, num_layers)
    written = launch(state_commit_kernel, grid, (indices, parents), sources, pools, interpret)
    return written[: len(ssm)], written[len(ssm) :]


def _form_windows(parent_of, part, chunk, layer, entry, pool_ref, input_ref) -> None:
    """Forms every window of some channels, then stores them."""
    width = pool_ref.shape[2]
    at, mask = pl.ds(part.start(chunk), part.block), part.mask(chunk)
    exists = jnp.full(part.block, True) if mask is None else mask

    def load(ref, *index, where=None):
        return triton.load(ref.at[(layer, *index, at)], mask=mask if where is None else exists & where)

    def store(slot, window):
        for j, column in enumerate(window):
            triton.store(pool_ref.at[layer, slot, jnp.int32(j), at], column, mask=mask)

    def window(old, target):
        columns = []
        for tap in taps(jnp.where(target.valid, target.step, 0), parent_of, width):
            column = load(input_ref, entry.row, jnp.maximum(tap - width, 0), where=tap >= width)
            for k in range(width):
                column = jnp.where(tap == k, old[k], column)
            columns.append(column)
        return columns

    def form_and_store():
        old = [load(pool_ref, entry.slot, jnp.int32(k)) for k in range(width)]
        windows = [window(old, target) for target in entry.targets]
        for target, columns in zip(entry.targets, windows, strict=True):
            pl.when(target.valid)(functools.partial(store, target.slot, columns))

    pl.when(entry.writes)(form_and_store)
