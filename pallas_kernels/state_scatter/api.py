"""The user function of the op: checks, then one implementation."""

from typing import Any

import jax

from pallas_kernels import dispatch
from pallas_kernels.arguments import Indices, check_indices, check_leaves, pair_leaves
from pallas_kernels.dispatch import Choice, Implementation
from pallas_kernels.state_scatter import mosaic_gpu, reference, triton
from pallas_kernels.validation import check_values

_OP = "state_scatter"


def state_scatter(
    dst: Any,
    src: Any,
    slots: jax.Array,
    steps: jax.Array,
    *,
    rows: jax.Array | None = None,
    track_slots: jax.Array | None = None,
    track_steps: jax.Array | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> Any:
    """Sets `dst[l, slots[i]] = src[l, rows[i], steps[i]]` for every layer l and entry i, and the tracked set likewise.

    In the shapes below, L is layers, S slots, R source rows, T steps, B entries. An entry whose slot, step or row is
    out of range is skipped (-1 is the padding index); all other bytes of `dst` stay as they are. When the caller's jit
    donates `dst`, nothing is copied. A slot named by two entries, live or tracked, ends up undefined.

    Args:
        dst: pytree of `[L, S, *x]`, the pool; donate it in the caller's jit.
        src: pytree of the same structure and dtypes, `[L, R, T, *x]`.
        slots: `[B]` int32, the slot each entry writes.
        steps: `[B]` int32, the step each entry takes.
        rows: `[B]` int32, the source row each entry reads; 0..B-1 by default.
        track_slots: `[B]` int32, a second slot that receives a state of the same row.
        track_steps: `[B]` int32, the step which goes there; required with track_slots.
        implementation: "xla", "triton", "mosaic_gpu", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.
        validate: eager calls only: raise on duplicate slots and on indices out of range other than -1.

    Returns:
        dst with the states written.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, with the leaf's path.
        NotImplementedError: a named implementation that the device cannot run.

    Source: the commit of SGLang's hybrid linear attention backend (pull request 25883).
    """
    leaves, treedef = pair_leaves(_OP, "dst", dst, "src", src)
    extent = check_leaves(_OP, "dst", "src", leaves, None)
    if extent is None:
        raise ValueError(f"{_OP}: dst has no leaves; expected a pytree of at least one [L, S, ...] array")
    indices = check_indices(_OP, extent, slots, steps, rows, track_slots, track_steps)
    if validate:
        check_values(_OP, extent, indices, reads_slots=False)
    choice = dispatch.resolve(_OP, implementation, interpret)

    results = [leaf.dst for leaf in leaves]
    moving = [i for i, leaf in enumerate(leaves) if leaf.dst.size and leaf.src.size and indices.slots.size]
    if moving:
        pools = [leaves[i].dst.reshape(extent.layers, extent.slots, -1) for i in moving]
        states = [leaves[i].src.reshape(*leaves[i].src.shape[:3], -1) for i in moving]
        for i, written in zip(moving, _run(choice, pools, states, indices, interpret), strict=True):
            results[i] = written.reshape(leaves[i].dst.shape)
    return jax.tree_util.tree_unflatten(treedef, results)


def _run(
    choice: Choice, pools: list[jax.Array], states: list[jax.Array], indices: Indices, interpret: bool
) -> list[jax.Array]:
    match choice.implementation:
        case "triton":
            return triton.scatter(pools, states, indices, interpret=interpret)
        case "mosaic_gpu":
            return mosaic_gpu.scatter(pools, states, indices, interpret=interpret)
        case "xla":
            return reference.scatter(pools, states, indices, row_copies=choice.device.platform == "cpu")
