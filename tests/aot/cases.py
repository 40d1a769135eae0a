"""What is compiled, and what each result must look like."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import state_commit, state_scatter
from pallas_kernels.state_commit import shapes as commit_shapes
from pallas_kernels.state_scatter import shapes as scatter_shapes
from tests.aot.inspect import Program

# An odd number of slots keeps strides from being powers of two; both models' pools then pass 2**31 elements.
SLOTS, BATCH, STEPS = 257, 64, (5, 17)

IMPLEMENTATIONS = {
    "sm_75": ("xla",),
    "sm_80": ("triton",),
    "sm_89": ("triton",),
    "sm_90": ("triton", "mosaic_gpu"),
    "sm_100": ("triton", "mosaic_gpu"),
}


# Nothing here divides anything: rows start at odd addresses and leave remainders of every block.
ODD = commit_shapes.CommitShape(3, (5, 7, 131), channels=1031, conv_width=4, ssm_dtype=jnp.int8, conv_dtype=jnp.float16)

# Per implementation: three functions for each model and T, and one of odd sizes.
CASES_EACH = 3 * len(commit_shapes.SHAPES) * len(STEPS) + 1


@dataclass(frozen=True)
class Case:
    """One function to compile; `index_reads` bounds the 32-bit loads that indices and parents may need.

    aligned: whether everything else must move in 128 bits; else nothing may be wider than an element.
    """

    name: str
    implementation: str
    function: Callable
    arguments: dict[str, Any]
    donate: tuple[str, ...]
    index_reads: int
    aligned: bool = True

    @property
    def pools(self) -> list[jax.ShapeDtypeStruct]:
        """The donated arrays."""
        return jax.tree.leaves([self.arguments[name] for name in self.donate])


def count(target: str) -> int:
    """How many cases a target has."""
    return len(IMPLEMENTATIONS[target]) * CASES_EACH


def cases(target: str) -> Iterator[Case]:
    """Everything compiled for a target."""
    for implementation in IMPLEMENTATIONS[target]:
        for model, shape in commit_shapes.SHAPES.items():
            for steps in STEPS:
                scatter = functools.partial(state_scatter, implementation=implementation)
                arguments = scatter_shapes.arguments(shape, SLOTS, BATCH, steps)
                yield Case(f"state_scatter {model} T={steps}", implementation, scatter, arguments, ("dst",), 4)
                for tree in (False, True):
                    commit = functools.partial(state_commit, implementation=implementation)
                    arguments = commit_shapes.arguments(shape, SLOTS, BATCH, steps, tree=tree)
                    kind = "tree" if tree else "chain"
                    reads = 4 + (2 * (shape.conv_width - 1) if tree else 0)
                    name = f"state_commit {model} T={steps} {kind}"
                    yield Case(name, implementation, commit, arguments, ("ssm", "conv"), reads)
        commit = functools.partial(state_commit, implementation=implementation)
        arguments = commit_shapes.arguments(ODD, slots=7, batch=5, steps=3, tree=True)
        yield Case("state_commit odd sizes", implementation, commit, arguments, ("ssm", "conv"), 99, aligned=False)


def broken_promises(case: Case, program: Program) -> list[str]:
    """What the compiled program does that it must not."""
    pool_bytes = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in case.pools)
    broken = []

    def expect(holds: bool, message: str):
        if not holds:
            broken.append(message)

    expect(program.copies == 0, f"{program.copies} copies")
    expect(program.alias_bytes == pool_bytes, f"{program.alias_bytes} bytes updated in place of {pool_bytes}")
    if case.implementation == "xla":
        windows = _window_bytes(case)
        expect(program.temp_bytes <= windows + 2**20, f"{program.temp_bytes} temporary bytes, {windows} are windows")
        return broken
    # XLA counts the table of output pointers as a temporary.
    expect(program.temp_bytes <= 8 * len(case.pools), f"{program.temp_bytes} temporary bytes")
    expect(len(program.launches) == 1, f"launches {program.launches}")
    expect(len(program.kernels) == 1, f"kernels {[kernel.name for kernel in program.kernels]}")
    for kernel in program.kernels:
        expect(kernel.spill_bytes == 0, f"{kernel.spill_bytes} bytes spilled")
        if not case.aligned:
            accesses = set(kernel.loads) | set(kernel.stores)
            # 32 bits are indices; a 16-bit and an 8-bit leaf with odd rows allow no more than their own width.
            expect(
                set(kernel.stores) == {8, 16} and accesses == {8, 16, 32}, f"accesses {kernel.loads} {kernel.stores}"
            )
            continue
        narrow = {width: count for width, count in kernel.loads.items() if width < 128}
        expect(kernel.stores[128] > 0 and set(kernel.stores) == {128}, f"stores {dict(kernel.stores)}")
        expect(kernel.loads[128] > 0, f"loads {dict(kernel.loads)}")
        expect(set(narrow) <= {32} and sum(narrow.values()) <= case.index_reads, f"narrow loads {narrow}")
        if case.implementation == "triton":
            # Shared memory would mean that values change threads between load and store: then a window could be
            # overwritten by one thread before another has read it.
            expect(kernel.shared_bytes == 0, f"{kernel.shared_bytes} bytes of shared memory")
        expect(_wide(case, kernel.ptx), "the layer stride of a pool past 2**31 elements is not multiplied in 64 bits")
    return broken


def _wide(case: Case, ptx: str) -> bool:
    """Whether the byte or element stride between layers of the largest pool only occurs in 64-bit products."""
    pool = max(case.pools, key=lambda pool: math.prod(pool.shape))
    if math.prod(pool.shape) <= 2**31:
        raise ValueError(f"{case.name}: the pool has only {math.prod(pool.shape)} elements, so it proves nothing")
    stride = math.prod(pool.shape[1:])
    strides = f"(?:{stride}|{stride * pool.dtype.itemsize})"
    wide = re.search(rf"(?:mul|mad)\.(?:wide\.[us]32|lo\.[us]64)[^;]*\b{strides}\b", ptx)
    narrow = re.search(rf"(?:mul|mad)\.lo\.[us]32[^;]*\b{strides}\b", ptx)
    return wide is not None and narrow is None


def _window_bytes(case: Case) -> int:
    """Bytes of the live and tracked conv windows of one call."""
    if "conv" not in case.arguments:
        return 0
    pool = case.arguments["conv"]
    return 2 * pool.shape[0] * BATCH * math.prod(pool.shape[2:]) * pool.dtype.itemsize
