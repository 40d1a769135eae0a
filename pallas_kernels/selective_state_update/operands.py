"""What the Triton kernels are launched on, and the launch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import THREADS, fitting_warps, launch
from pallas_kernels.recurrent.arguments import Fold, Pass, StateUpdate
from pallas_kernels.tree import ancestor_mask

_ROWS = 32  # of P a program: fewer would read B and C too often, more would need more registers than there are


class Reads(NamedTuple):
    """Arrays that a launch reads, or in a kernel their refs; None where the pass has none.

    Attributes:
        layer: `[1]` int32, read rather than compiled in, so that all layers share one kernel.
        slots: `[B]`.
        A, D: `[H]`.
        inputs: the window's `SSMInputs`.
        state, ring: the pool and the ring's inputs, where the pass does not write them.
        starts, counts, order: `[S]` and `[S, Q]`, the ring's.
        fold: `[B]`.
        num_tokens, to_slots: `[B]`, of a fold without a window; num_tokens None is the counts.
        visible: `[B, T, T]` int32, of a tree: whether a node (axis 2) is on the path to another (axis 1).
    """

    layer: Any
    slots: Any
    A: Any
    D: Any = None
    inputs: Any = None
    state: Any = None
    ring: Any = None
    starts: Any = None
    counts: Any = None
    order: Any = None
    fold: Any = None
    num_tokens: Any = None
    to_slots: Any = None
    visible: Any = None


class Buffers(NamedTuple):
    """Arrays that a launch updates in place: the pool, the snapshots, the ring's inputs."""

    state: Any = None
    snapshots: Any = None
    ring: Any = None


class Blocks(NamedTuple):
    """How a state is cut: `rows` of P and `cols` of N at once, powers of two that may reach past the state."""

    rows: int
    cols: int
    num_warps: int

    @classmethod
    def of(cls, head_dim: int, state: int, *, least: int, most: int | None, numbers: int) -> "Blocks":
        """Blocks of states `[P, N]`.

        Args:
            least: rows and columns at least.
            most: columns at most, or None.
            numbers: of the state that a thread holds at once.
        """
        rows, cols = min(_ROWS, pl.next_power_of_2(head_dim)), pl.next_power_of_2(state)
        rows, cols = max(least, rows), max(least, cols if most is None else min(most, cols))
        return cls(rows, cols, fitting_warps(rows * cols, rows * cols // (THREADS * numbers)))


Kernel = Callable[[Reads, Any, Buffers], None]


def launch_update(kernel: Kernel, blocks: Blocks, rule: Any, call: Pass, *, interpret: bool) -> StateUpdate:
    """Runs `kernel(reads, y ref, buffers)` on a window."""
    state, ring, in_place = call.state, call.ring, call.writes_state or call.ring is not None
    buffers = Buffers(state if in_place else None, call.snapshots, None if ring is None else ring.inputs)
    reads = Reads(_array(call.layer), call.slots, rule.A, rule.D, call.inputs, fold=call.fold)
    if not in_place:
        reads = reads._replace(state=state)
    if call.parents is not None:
        reads = reads._replace(visible=ancestor_mask(call.parents).astype(jnp.int32))
    if ring is not None:
        reads = reads._replace(starts=ring.starts, counts=ring.counts, order=ring.order)
    x = call.inputs.x
    y, written = _launch(kernel, blocks, reads, jax.ShapeDtypeStruct(x.shape, x.dtype), buffers, state, interpret)
    return StateUpdate(
        y,
        written.state if in_place else state,
        written.snapshots,
        None if ring is None else ring._replace(inputs=written.ring),
    )


def launch_fold(kernel: Kernel, blocks: Blocks, rule: Any, call: Fold, *, interpret: bool) -> jax.Array:
    """Runs `kernel(reads, None, buffers)` on histories alone."""
    ring = call.ring
    reads = Reads(_array(call.layer), call.slots, rule.A, ring=ring.inputs, starts=ring.starts, counts=ring.counts)
    reads = reads._replace(order=ring.order, num_tokens=call.num_tokens, to_slots=call.to_slots)
    return _launch(kernel, blocks, reads, None, Buffers(call.state), call.state, interpret)[1].state


def _launch(kernel, blocks, reads, outputs, buffers, state, interpret):
    # Programs that share inputs follow each other.
    grid = pl.cdiv(state.shape[3], blocks.rows), state.shape[2], reads.slots.size
    return launch(kernel, grid, reads, outputs, buffers, num_warps=blocks.num_warps, interpret=interpret)


def _array(layer: int | jax.Array) -> jax.Array:
    return jnp.full(1, layer, jnp.int32)
