"""What one program of a kernel knows of the entry it works on."""

import functools
import operator
from typing import Any, NamedTuple

import jax

from pallas_kernels.arguments import Indices


class Target(NamedTuple):
    """One state to write: the slot it goes to, the step it comes from, and whether it is written at all."""

    slot: jax.Array
    step: jax.Array
    valid: jax.Array


class Entry(NamedTuple):
    """One entry: its live slot, the row it reads, and its targets: the live one, then the tracked one if any."""

    slot: jax.Array
    row: jax.Array
    targets: tuple[Target, ...]

    @property
    def writes(self) -> jax.Array:
        """Whether any target is written."""
        return functools.reduce(operator.or_, (target.valid for target in self.targets))


def read_entry(
    index_refs: Indices, i: jax.Array, num_slots: int, num_rows: int, num_steps: int, *, needs_slot: bool
) -> Entry:
    """Reads entry i from refs of the index arrays; needs_slot: a tracked state needs the live slot in range."""
    read: Any = jax.tree.map(lambda ref: ref[i], index_refs)
    slot, step, row, track_slot, track_step = read
    row = i if row is None else row
    has_row, has_slot = inside(row, num_rows), inside(slot, num_slots)
    targets = [Target(slot, step, has_row & has_slot & inside(step, num_steps))]
    if track_slot is not None:
        source = has_row & has_slot if needs_slot else has_row
        targets.append(
            Target(track_slot, track_step, source & inside(track_slot, num_slots) & inside(track_step, num_steps))
        )
    return Entry(slot, row, tuple(targets))


def inside(index: jax.Array, limit: int) -> jax.Array:
    """Where an index is neither padding nor out of range."""
    return (index >= 0) & (index < limit)
