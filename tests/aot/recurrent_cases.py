"""The recurrences' and convolutions' kernels: what is compiled, and what each result must look like."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels import causal_conv1d_update, fold_history, selective_state_update
from pallas_kernels.causal_conv1d_update import shapes as conv_shapes
from pallas_kernels.selective_state_update import shapes as ssm_shapes
from tests.aot.inspect import Kernel, Program
from tests.aot.promises import Expect, broken_launch, donated_bytes
from tests.aot.targets import shapes_for

SLOTS, BATCH, LAYER = 257, 64, 3
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100")
CASES = {"sm_90": 76}
CASES_ELSEWHERE = 28

# What a pass leaves behind, the tokens of a window, and the ring's length.
_STEP = (("state", 1, 0), ("snapshots", 4, 0), ("nothing", 4, 0), ("ring", 1, 8), ("ring", 4, 16), ("ring", 16, 64))
_CHUNK = (("state", 16, 0), ("snapshots", 4, 0), ("nothing", 16, 0), ("ring", 4, 16), ("ring", 16, 64))
_TREE = (("snapshots", 8, 0), ("ring", 8, 32), ("ring", 16, 64))
_DONATED = {"state": ("state",), "snapshots": ("state", "snapshots"), "ring": ("state", "ring"), "nothing": ("state",)}


@dataclass(frozen=True)
class Case:
    """One function to compile, and what its kernel is held to.

    Attributes:
        donate: names of arguments that are updated in place, or passed through.
        wide: 128-bit loads and stores there must be at least: of the numbers of the state that a thread holds at
            once, or of its channels.
        step: no product may be fused with a sum, but in the exponential of each token.
        matrix: tensor cores must be used.
        channels: no value may change threads.
        implementation: for the table.
    """

    name: str
    function: Callable
    arguments: dict[str, Any]
    donate: tuple[str, ...]
    kernel: str
    wide: tuple[int, int]
    step: bool = False
    matrix: bool = False
    channels: bool = False
    implementation: str = "triton"


def expected(target: str) -> int:
    """How many cases a target has."""
    return CASES.get(target, CASES_ELSEWHERE) if target in TARGETS else 0


def cases(target: str) -> Iterator[Case]:
    """Everything compiled for a target; the reference is compiled for none."""
    if target not in TARGETS:
        return
    for model, shape in shapes_for(target, ssm_shapes.SHAPES).items():
        for form, passes, tree in (("step", _STEP, False), ("chunk", _CHUNK, False), ("step", _TREE[:2], True),
                                   ("chunk", _TREE, True)):  # fmt: skip
            for keep, tokens, length in passes:
                yield _ssm_case(model, shape, form, keep, tokens, length, tree)
        for form in ("step", "chunk"):
            yield _fold_case(model, shape, form)
    halved = dataclasses.replace(ssm_shapes.NEMOTRON_3_SUPER, state_dtype=jnp.bfloat16)
    for form in ("step", "chunk"):
        for keep, tokens, length in (_STEP[0], _STEP[1], _STEP[4]):
            yield _ssm_case("nemotron-3-super bf16", halved, form, keep, tokens, length, False)
    for model, conv in shapes_for(target, conv_shapes.SHAPES).items():
        for tokens, record, tree in ((1, False, False), (4, True, False), (16, True, True), (256, False, False)):
            arguments = conv_shapes.arguments(conv, SLOTS, BATCH, tokens, record=record, tree=tree)
            function = functools.partial(causal_conv1d_update, layer=LAYER, implementation="triton")
            name = f"conv {model} T={tokens}{' record' if record else ''}{' tree' if tree else ''}"
            donate = ("conv_state", "conv_inputs") if record else ("conv_state",)
            yield Case(name, function, arguments, donate, "causal_conv1d_update_kernel", (1, 1), channels=True)


def broken_promises(case: Case, program: Program) -> list[str]:
    """What the compiled program does that it must not."""
    in_place = donated_bytes(case)
    if "ring" in case.donate:  # its cursors are the caller's to move, and pass through
        in_place = max(in_place, program.alias_bytes)
    named = [kernel for kernel in program.kernels if kernel.name == case.kernel]
    return broken_launch(case, program, named, _check_kernel, in_place=in_place, pointers=128)


def _check_kernel(case: Case, kernel: Kernel, expect: Expect) -> None:
    expect(kernel.spill_bytes == 0, f"{kernel.spill_bytes} bytes spilled")
    loads, stores = case.wide
    expect(kernel.loads[128] >= loads, f"loads {dict(kernel.loads)}, of 128 bits at least {loads}")
    expect(kernel.stores[128] >= stores, f"stores {dict(kernel.stores)}, of 128 bits at least {stores}")
    tensor = len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", kernel.ptx))
    expect((tensor > 0) == case.matrix, f"{tensor} tensor core instructions")
    if case.step:
        # The exponential takes three; a product of the state fused with a sum would come 32 at a time.
        fused = len(re.findall(r"\bfma\.rn\.f32", kernel.ptx))
        expect(fused < 16, f"{fused} products fused with sums")
    if case.channels:
        moved = re.findall(r"\b(?:bar\.sync|[sl][td]\.shared|shfl)", kernel.ptx)
        expect(not moved, f"values change threads: {sorted(set(moved))}")


def _ssm_case(model, shape, form, keep, tokens, length, tree) -> Case:
    function = functools.partial(
        selective_state_update,
        layer=LAYER,
        form=form,
        disable_state_update=keep == "nothing",
        implementation="triton",
    )
    arguments = ssm_shapes.arguments(shape, SLOTS, BATCH, tokens, keep=keep, tree=tree, length=length)
    name = f"ssm {model} {form} {keep} T={tokens}{' tree' if tree else ''}"
    kernel = "selective_state_update_kernel" if form == "step" else "selective_state_update_chunk_kernel"
    accesses = _accesses(shape, form)
    wide = accesses, 0 if keep == "nothing" else accesses
    return Case(name, function, arguments, _DONATED[keep], kernel, wide, step=form == "step", matrix=form == "chunk")


def _fold_case(model, shape, form) -> Case:
    given = ssm_shapes.arguments(shape, SLOTS, BATCH, 1, keep="ring", length=32)
    arguments = {name: given[name] for name in ("state", "ring", "A", "slots")}
    function = functools.partial(fold_history, layer=LAYER, form=form, implementation="triton")
    kernel = "fold_history_kernel" if form == "step" else "fold_history_chunk_kernel"
    wide = _accesses(shape, form), _accesses(shape, form)
    name = f"fold {model} {form}"
    return Case(name, function, arguments, ("state",), kernel, wide, step=form == "step", matrix=form == "chunk")


def _accesses(shape, form) -> int:
    """128-bit accesses a thread needs for what it holds of the state at once."""
    return {"step": 32, "chunk": 16}[form] * jnp.dtype(shape.state_dtype).itemsize // 16
