"""One launch of a Triton kernel that reads some arrays, fills some and updates others in place."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.loops import varying_axes

THREADS = 32  # of a warp


def fitting_warps(elements: int, most: int) -> int:
    """Warps of a program whose tile of a buffer, read and written in place, has `elements`: at most `most`.

    With more threads than elements several threads hold one element, and nothing makes a warp wait: one could store
    the new value before another has loaded the old one.
    """
    return max(1, min(most, elements // THREADS))


def launch(
    kernel: Callable[[Any, Any, Any], None],
    grid: tuple[int, ...],
    inputs: Any,
    outputs: Any,
    buffers: Any,
    *,
    num_warps: int,
    interpret: bool,
) -> tuple[Any, Any]:
    """Runs `kernel(input refs, output refs, buffer refs)`; the refs are the arrays themselves, not copies.

    Args:
        kernel: one program; its name is the kernel's.
        grid: programs, the first axis fastest.
        inputs: pytree of arrays that are read.
        outputs: pytree of `ShapeDtypeStruct`, written whole.
        buffers: pytree of arrays read and written in place.
        num_warps: of one program.
        interpret: run on the CPU, for tests.

    Returns:
        The outputs and the buffers.
    """
    read, filled, updated = (jax.tree.leaves(tree) for tree in (inputs, outputs, buffers))
    structure = jax.tree.structure((inputs, outputs, buffers))

    def flat_kernel(*refs):
        kernel(*jax.tree.unflatten(structure, refs[: len(read)] + refs[len(read) + len(updated) :]))

    flat_kernel.__name__ = kernel.__name__
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        flat_kernel,
        grid=grid,
        in_specs=[anywhere] * (len(read) + len(updated)),
        out_specs=[anywhere] * (len(filled) + len(updated)),
        out_shape=result_shapes(filled + updated, read + updated),
        input_output_aliases={len(read) + i: len(filled) + i for i in range(len(updated))},
        # One stage: latency is hidden by other programs, and copies in flight would take their registers.
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(*read, *updated)
    return (
        jax.tree.unflatten(jax.tree.structure(outputs), results[: len(filled)]),
        jax.tree.unflatten(jax.tree.structure(buffers), results[len(filled) :]),
    )


def result_shapes(results: list[Any], operands: list[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """A kernel's `out_shape`: under `jax.shard_map`, results vary over the mesh axes over which any operand does."""
    kind = jax.sharding.ManualAxisType(varying=varying_axes(*operands))
    return [jax.ShapeDtypeStruct(result.shape, result.dtype, manual_axis_type=kind) for result in results]
