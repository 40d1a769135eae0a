"""What of `decode_attention` is compiled, and what each result must look like."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels import decode_attention
from pallas_kernels.decode_attention.shapes import SHAPES, AttentionShape, arguments
from pallas_kernels.decode_attention.triton import Plan, plan
from tests.aot.inspect import Program

# Buffers pass 2**31 elements, and a slot's stride is no power of two, so that its product can be found in the PTX.
SLOTS, MAX_LEN = 257, 33_001
MODELS = ("nemotron-3-super", "qwen3-next", "granite-4-h-small", "falcon-h1-34b")
SIZES = ((1, 1, False), (64, 5, False), (64, 17, True))  # B, T, tree
OTHERS = {
    "float32": AttentionShape(1, heads=32, kv_heads=2, head_dim=128, dtype=jnp.float32),
    "odd sizes": AttentionShape(1, heads=6, kv_heads=2, head_dim=80, dtype=jnp.float16),
}


@dataclass(frozen=True)
class Case:
    """One function to compile."""

    name: str
    function: Callable
    arguments: dict[str, Any]
    implementation: str = "triton"
    donate: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """How the kernels divide it."""
        query, keys = self.arguments["query"], self.arguments["keys"]
        return plan(query.shape, keys.shape, keys.shape[1], query.dtype.itemsize, interpret=False)


def expected(target: str) -> int:
    """How many cases a target has."""
    return 0 if target == "sm_75" else len(MODELS) * len(SIZES) + len(OTHERS)


def cases(target: str) -> Iterator[Case]:
    """Everything compiled for a target."""
    if target == "sm_75":
        return
    attend = functools.partial(decode_attention, scale=0.1, implementation="triton")
    for model in MODELS:
        for batch, width, tree in SIZES:
            given = arguments(SHAPES[model], SLOTS, MAX_LEN, batch, width, tree=tree)
            yield Case(f"attention {model} B={batch} T={width}{' tree' * tree}", attend, given)
    for name, shape in OTHERS.items():
        yield Case(f"attention {name}", attend, arguments(shape, 17, 777, batch=5, steps=3, tree=True))


def broken_promises(case: Case, program: Program) -> list[str]:
    """What the compiled program does that it must not."""
    division, query, keys = case.plan, case.arguments["query"], case.arguments["keys"]
    broken = []

    def expect(holds: bool, message: str):
        if not holds:
            broken.append(message)

    parts = math.prod(query.shape[:3]) * (division.size + 2) * 4 * division.splits * (division.splits > 1)
    scaled = math.prod(query.shape) * query.dtype.itemsize
    expect(program.copies == 0, f"{program.copies} copies")
    expect(program.temp_bytes <= parts + scaled + 2**16, f"{program.temp_bytes} temporary bytes, {parts} are parts")
    kernels = {kernel.name: kernel for kernel in program.kernels if "decode_attention" in kernel.name}
    names = ["decode_attention_attend_kernel", "decode_attention_combine_kernel"][: 1 + (division.splits > 1)]
    expect(sorted(kernels) == names, f"kernels {sorted(kernels)}")
    for kernel in kernels.values():
        expect(kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes")
    ptx = kernels[names[0]].ptx
    copied = set(re.findall(r"cp\.async\.\S+ \[[^\]]*\], \[[^\]]*\], (0x[0-9a-f]+|\d+)", ptx))
    expect(copied == {"0x10"}, f"keys and values are read in pieces of {copied} bytes")
    if query.dtype.itemsize == 2:
        expect(re.search(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx) is not None, "no tensor cores")
    if math.prod(keys.shape) > 2**31:
        stride = math.prod(keys.shape[1:])
        expect(re.search(rf"(?:mul|mad)\.(?:wide\.[us]32|lo\.[us]64)[^;]*\b{stride}\b", ptx) is not None, "no 64 bits")
        expect(re.search(rf"(?:mul|mad)\.lo\.[us]32[^;]*\b{stride}\b", ptx) is None, "32-bit offsets of slots")
    return broken
