"""The gated delta rule's kernels at the shapes of published models: what is compiled, and what it must look like."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gated_delta_update import fold_history, gated_delta_update, shapes
from tests.aot.inspect import Kernel, Program
from tests.aot.promises import Expect, broken_launch, donated_bytes
from tests.aot.targets import shapes_for

SLOTS, BATCH, LAYER = 257, 8, 3
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")

# What a pass leaves behind, the tokens of a window, the ring's length, and whether the window is a tree.
_STEPS = (
    ("state", 1, 0, False),
    ("snapshots", 4, 0, False),
    ("nothing", 4, 0, False),
    ("ring", 1, 8, False),
    ("ring", 4, 16, False),
    ("ring", 16, 64, False),
    ("snapshots", 8, 0, True),
    ("ring", 16, 64, True),
)
_CHUNKS = (
    ("nothing", 16, 0, False),
    ("snapshots", 4, 0, False),
    ("ring", 4, 16, False),
    ("ring", 16, 64, False),
    ("snapshots", 8, 0, True),
    ("ring", 8, 32, True),
    ("ring", 16, 64, True),
)
_HALVED = (
    *(("step", *given) for given in _STEPS[:2] + _STEPS[4:5]),
    *(("chunk", *given) for given in (_CHUNKS[1], _CHUNKS[2], _CHUNKS[6])),
)
_DONATED = {"state": ("state",), "snapshots": ("state", "snapshots"), "ring": ("state", "ring"), "nothing": ("state",)}


@dataclass(frozen=True)
class Case:
    """One function to compile.

    Attributes:
        accesses: how many 128-bit loads and stores the state's tile takes at least.
        matrix: whether tensor cores must be used; elsewhere no product may be fused with a sum.
    """

    name: str
    function: Callable
    arguments: dict[str, Any]
    donate: tuple[str, ...]
    accesses: tuple[int, int]
    matrix: bool
    implementation: str = "triton"


def cases(target: str) -> Iterator[Case]:
    """Everything compiled for a target; nothing where the kernel does not run."""
    if target not in TARGETS:
        return
    for model, shape in shapes_for(target, shapes.SHAPES).items():
        for form, passes in (("step", _STEPS), ("chunk", _CHUNKS)):
            for keep, tokens, length, tree in passes:
                yield _update_case(model, shape, form, keep, tokens, length, tree)
            yield _fold_case(model, shape, form)
    halved = dataclasses.replace(shapes.QWEN3_NEXT, state_dtype=jnp.bfloat16)
    for form, keep, tokens, length, tree in _HALVED:
        yield _update_case("qwen3-next bf16", halved, form, keep, tokens, length, tree)


def expected(target: str) -> int:
    """How many cases a target has."""
    of_model = len(_STEPS) + len(_CHUNKS) + 2
    return len(shapes_for(target, shapes.SHAPES)) * of_model + len(_HALVED) if target in TARGETS else 0


def broken_promises(case: Case, program: Program) -> list[str]:
    """What the compiled program does that it must not."""
    named = [kernel for kernel in program.kernels if kernel.name.startswith("gated_delta_")]
    return broken_launch(case, program, named, _check_kernel, in_place=donated_bytes(case), pointers=64)


def _check_kernel(case: Case, kernel: Kernel, expect: Expect) -> None:
    expect(kernel.spill_bytes == 0, f"{kernel.spill_bytes} bytes spilled")
    loads, stores = case.accesses
    expect(kernel.loads[128] >= loads, f"loads {dict(kernel.loads)}, of 128 bits at least {loads}")
    expect(kernel.stores[128] >= stores, f"stores {dict(kernel.stores)}, of 128 bits at least {stores}")
    tensor = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", kernel.ptx))
    expect((tensor > 0) == case.matrix, f"{tensor} tensor core instructions")
    if not case.matrix:
        # An exponential has its own fused products, a few for each number of a decay; those of the state would come
        # with its sums, which round to the nearest as everything else does.
        exponentials = len(re.findall(r"\bex2\.approx", kernel.ptx))
        fused = len(re.findall(r"\bfma\.rn\.f32", kernel.ptx))
        expect(exponentials > 0 and fused <= 3 * exponentials, f"{fused} fused products, {exponentials} exponentials")


def _update_case(model: str, shape: Any, form: str, keep: str, tokens: int, length: int, tree: bool) -> Case:
    function = functools.partial(
        gated_delta_update, layer=LAYER, form=form, disable_state_update=keep == "nothing", implementation="triton"
    )
    arguments = shapes.arguments(shape, SLOTS, BATCH, tokens, keep=keep, tree=tree, length=length)
    name = f"delta {model} {form} {keep} T={tokens}{' tree' if tree else ''}"
    accesses = _accesses(shape, form)
    wide = accesses, 0 if keep == "nothing" else accesses
    return Case(name, function, arguments, _DONATED[keep], wide, matrix=form == "chunk")


def _fold_case(model: str, shape: Any, form: str) -> Case:
    given = shapes.arguments(shape, SLOTS, BATCH, 1, keep="ring", length=32)
    rows = given["slots"]
    arguments = {name: given[name] for name in ("state", "ring", "slots")} | {"num_tokens": rows, "to_slots": rows}
    function = functools.partial(fold_history, layer=LAYER, form=form, implementation="triton")
    accesses = _accesses(shape, form), _accesses(shape, form)
    return Case(f"delta fold {model} {form}", function, arguments, ("state",), accesses, matrix=form == "chunk")


def _accesses(shape: Any, form: str) -> int:
    """128-bit accesses of a thread for its share of the state: 32 numbers, 16 of 16 bits in the step form."""
    if jnp.dtype(shape.state_dtype).itemsize == 4:
        return 8
    return {"step": 2, "chunk": 4}[form]
