"""What the kernels of both recurrences promise alike: one launch, in place, without a copy."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tests.aot.inspect import Kernel, Program

Expect = Callable[[bool, str], None]


def donated_bytes(case: Any) -> int:
    """Bytes of the arguments that a case donates."""
    donated = jax.tree.leaves([case.arguments[name] for name in case.donate])
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in donated)


def broken_launch(
    case: Any,
    program: Program,
    named: Sequence[Kernel],
    check_kernel: Callable[[Any, Kernel, Expect], None],
    *,
    in_place: int,
    pointers: int,
) -> list[str]:
    """What a compiled program does that it must not.

    Args:
        case: what was compiled.
        program: what became of it.
        named: the op's kernels in it.
        check_kernel: what else each of them promises.
        in_place: bytes that are updated in place.
        pointers: bytes of tables of output pointers, which XLA counts as temporary.
    """
    # A tree's masks are computed once a step, whatever the number of layers.
    tree = "parents" in case.arguments
    masks = 8 * math.prod(case.arguments["parents"].shape) * case.arguments["parents"].shape[1] if tree else 0
    broken = []

    def expect(holds: bool, message: str):
        if not holds:
            broken.append(message)

    expect(program.copies == 0, f"{program.copies} copies")
    expect(program.alias_bytes == in_place, f"{program.alias_bytes} bytes updated in place of {in_place}")
    expect(program.temp_bytes <= pointers + masks, f"{program.temp_bytes} temporary bytes")
    launches = program.launches.count("custom-call")
    expect(launches == len(named) == 1, f"{launches} launches of {[kernel.name for kernel in program.kernels]}")
    expect(tree or len(program.launches) == 1, f"launches {program.launches}")
    for kernel in named:
        check_kernel(case, kernel, expect)
    return broken
