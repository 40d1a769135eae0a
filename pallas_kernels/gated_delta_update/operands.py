"""What the Triton kernels are launched on, and the launch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_update.recurrence import Tokens
from pallas_kernels.launch import launch
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.state_scatter.triton import check_offsets

_OP = "gated_delta_update"


class Reads(NamedTuple):
    """Arrays that a launch reads, or in a kernel their refs; None where the pass has none.

    Attributes:
        slots: `[B]`.
        num_tokens: `[B]`; of a fold, None is the counts.
        tokens: the window's.
        visible: `[B, T, T]`, of a tree: whether a node (axis 2) is on the path to another (axis 1).
        state: the pool, where the pass does not write it.
        kept: inputs of a ring that the pass does not write.
        order: `[S, Q]`, the ring's.
        starts, counts: `[S]`, the ring's.
        fold: `[B]`.
        to_slots: `[B]`, of a fold without a window.
    """

    slots: Any
    num_tokens: Any
    tokens: Any = None
    visible: Any = None
    state: Any = None
    kept: Any = None
    order: Any = None
    starts: Any = None
    counts: Any = None
    fold: Any = None
    to_slots: Any = None


class Buffers(NamedTuple):
    """Arrays that a launch updates in place: the pool, the snapshots, the ring's inputs."""

    state: Any = None
    snapshots: Any = None
    kept: Any = None


Kernel = Callable[[Reads, Any, Buffers], None]


def launch_update(
    kernel: Kernel, call: Pass, visible: jax.Array | None, *, rows: int, num_warps: int, interpret: bool
) -> StateUpdate:
    """Runs `kernel(reads, o ref, buffers)` on a window, a program of it on `rows` of V."""
    ring, in_place = call.ring, writes_state(call)
    reads = Reads(call.slots, call.num_tokens, call.inputs, visible, None if in_place else call.state, fold=call.fold)
    buffers = Buffers(call.state if in_place else None, call.snapshots)
    if ring is not None:
        reads = reads._replace(order=ring.order, starts=ring.starts, counts=ring.counts)
        buffers = buffers._replace(kept=Tokens(**ring.inputs))
    o = jax.ShapeDtypeStruct(call.inputs.v.shape, call.inputs.v.dtype)
    o, written = _launch(kernel, reads, o, buffers, call.state, rows, num_warps, interpret)
    if ring is not None:
        ring = ring._replace(inputs={name: getattr(written.kept, name) for name in ring.inputs})
    return StateUpdate(o, written.state if in_place else call.state, written.snapshots, ring)


def launch_fold(kernel: Kernel, call: Fold, *, rows: int, num_warps: int, interpret: bool) -> jax.Array:
    """Runs `kernel(reads, None, buffers)` on histories alone."""
    ring = call.ring
    reads = Reads(call.slots, call.num_tokens, kept=Tokens(**ring.inputs), to_slots=call.to_slots)
    reads = reads._replace(order=ring.order, starts=ring.starts, counts=ring.counts)
    return _launch(kernel, reads, None, Buffers(call.state), call.state, rows, num_warps, interpret)[1].state


def writes_state(call: Pass) -> bool:
    """Whether the pass may write the pool."""
    return call.writes_state or call.ring is not None


def _launch(kernel, reads, outputs, buffers, state, rows, num_warps, interpret):
    check_offsets(_OP, jax.tree.leaves((reads, buffers)))
    grid = pl.cdiv(state.shape[3], rows), state.shape[2], reads.slots.size
    return launch(kernel, grid, reads, outputs, buffers, num_warps=num_warps, interpret=interpret)


def stored_count(reads: Reads, b: jax.Array, slot: jax.Array) -> jax.Array:
    """How many inputs of its ring row b folds."""
    return reads.counts[slot] if reads.num_tokens is None else reads.num_tokens[b]
