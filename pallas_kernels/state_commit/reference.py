"""The op in plain JAX, `implementation="xla"`.

SSM leaves arrive as pool `[L, S, X]` and states `[L, R, T, X]`; conv leaves as pool `[L, S, W-1, C]` and inputs
`[L, R, T, C]`. Row copies on CPUs, gather and scatter elsewhere: see `state_scatter/reference.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Indices
from pallas_kernels.entries import inside
from pallas_kernels.state_commit.window import earlier, taps
from pallas_kernels.state_scatter import reference as state_scatter
from pallas_kernels.state_scatter.reference import (
    bits,
    for_each,
    movable,
    read,
    restored,
    scatter_rows,
    source_rows,
    write,
)


def commit(
    ssm: list[jax.Array],
    conv: list[jax.Array],
    ssm_states: list[jax.Array],
    conv_inputs: list[jax.Array],
    parents: jax.Array | None,
    indices: Indices,
    *,
    row_copies: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The pools with the live and tracked states and windows written; row_copies picks the form for CPUs."""
    indices = indices._replace(rows=source_rows(indices))
    if indices.track_slots is not None:
        # A tracked window starts from the live slot's old one, so an entry without a live slot has no tracked state.
        has_slot = inside(indices.slots, (ssm + conv)[0].shape[1])
        indices = indices._replace(track_slots=jnp.where(has_slot, indices.track_slots, -1))
    if conv:
        form = _windows_by_row if row_copies else _windows_at_once
        conv = [form(pool, inputs, parents, indices) for pool, inputs in zip(conv, conv_inputs, strict=True)]
    if ssm:
        ssm = state_scatter.scatter(ssm, ssm_states, indices, row_copies=row_copies)
    return ssm, conv


def _windows_by_row(pool, inputs, parents, indices):
    layers, _, width, channels = pool.shape
    live, track = _targets(pool, inputs, parents, indices)
    inputs = movable(inputs)

    def form(i, pool):
        slot, row = indices.slots[i], indices.rows[i]
        old = bits(read(pool, (0, slot, 0, 0), (layers, 1, width, channels)))

        def window(where):
            columns = []
            for j in range(width):
                tap = where[i, j]
                column = read(old, (0, 0, jnp.minimum(tap, width - 1), 0), (layers, 1, 1, channels))
                fresh = read(inputs, (0, row, jnp.maximum(tap - width, 0), 0), column.shape)
                columns.append(jnp.where(tap < width, column, bits(fresh)))
            return restored(jnp.concatenate(columns, axis=2), pool.dtype)

        now = window(live.taps)
        if track is None:
            return write(pool, now, (0, slot, 0, 0))
        # Both windows are formed before either is stored. Each store is used for the other where that set skips the
        # entry, which is cheaper here than a branch and never rewrites a slot that is to be left alone.
        tracked, track_slot = window(track.taps), track.slots[i]
        first = jnp.where(live.valid[i], now, tracked), jnp.where(live.valid[i], slot, track_slot)
        second = jnp.where(track.valid[i], tracked, now), jnp.where(track.valid[i], track_slot, slot)
        for value, at in (first, second):
            pool = write(pool, value, (0, at, 0, 0))
        return pool

    valid = live.valid if track is None else live.valid | track.valid
    return restored(for_each(valid, form, movable(pool)), pool.dtype)


def _windows_at_once(pool, inputs, parents, indices):
    layers, _, width, _ = pool.shape
    targets = [target for target in _targets(pool, inputs, parents, indices) if target is not None]
    old = pool.at[:, indices.slots].get(mode="clip")
    layer, row = jnp.arange(layers, dtype=jnp.int32)[:, None, None], indices.rows[:, None]
    windows = []
    for target in targets:
        kept = jnp.take_along_axis(old, jnp.minimum(target.taps, width - 1)[None, :, :, None], axis=2)
        fresh = inputs.at[layer, row, jnp.maximum(target.taps - width, 0)].get(mode="clip")
        window = jnp.where((target.taps < width)[:, :, None], bits(kept), bits(fresh))
        windows.append(restored(window, pool.dtype))
    slots = jnp.concatenate([target.slots for target in targets])
    valid = jnp.concatenate([target.valid for target in targets])
    # Without the barrier XLA reads the old windows inside the scatter, and copies the whole pool to be able to.
    return scatter_rows(pool, slots, valid, lax.optimization_barrier(jnp.concatenate(windows, axis=1)))


class _Target(NamedTuple):
    """One index set: the slots to write `[B]`, which entries do, and the taps of their windows `[B, W-1]`."""

    slots: jax.Array
    valid: jax.Array
    taps: jax.Array


def _targets(pool, inputs, parents, indices) -> tuple[_Target, _Target | None]:
    _, num_slots, width, _ = pool.shape
    _, num_rows, num_steps, _ = inputs.shape
    present = inside(indices.slots, num_slots) & inside(indices.rows, num_rows)

    def parent_of(node):
        if parents is None:
            return node - 1
        return earlier(jnp.take_along_axis(parents, node[:, None], axis=1)[:, 0], node)

    def target(slots, steps):
        valid = present & inside(slots, num_slots) & inside(steps, num_steps)
        return _Target(slots, valid, jnp.stack(taps(jnp.where(valid, steps, 0), parent_of, width), axis=1))

    live = target(indices.slots, indices.steps)
    return live, None if indices.track_slots is None else target(indices.track_slots, indices.track_steps)
