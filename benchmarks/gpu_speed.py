"""Attention and convolution of published models on a device: time, and bytes a second against a copy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import byte_model
from benchmarks.byte_model import Bytes
from benchmarks.gpu_compile import compile_all
from benchmarks.gpu_draws import fill
from benchmarks.gpu_kernels import named
from benchmarks.gpu_ops import free_bytes, runnable
from benchmarks.gpu_report import Results, attempt
from benchmarks.ops import copying, total_bytes
from benchmarks.published import Model
from benchmarks.timing import measure, rounded
from pallas_kernels import causal_conv1d_update, decode_attention
from pallas_kernels.causal_conv1d_update import shapes as conv_shapes
from pallas_kernels.decode_attention import shapes as attention_shapes


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        models: whose layers.
        tokens: T.
        contexts: batch and committed positions.
        batches: of the convolution.
        calls: of an op in a timed run.
        copied: bytes of the copy.
        rounds: of timings.
        interpret: whether this proves the script alone.
    """

    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    calls: int
    copied: int
    rounds: int
    interpret: bool


FULL = Sizes(
    models=named("nemotron-3-super", "qwen3-next"), tokens=(1, 4, 16),
    contexts=((1, 32768), (32, 8192), (256, 2048)), batches=(8, 256), calls=16, copied=2**28, rounds=5, interpret=False,
)  # fmt: skip
QUICK = dataclasses.replace(
    FULL, models=FULL.models[:1], tokens=(2,), contexts=((1, 20),), batches=(1,), calls=2, copied=2**10, rounds=1,
    interpret=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """An op called again and again, on other slots each time: `call(given, how)` returns what changes."""

    op: str
    label: dict[str, Any]
    shapes: dict[str, Any]
    changes: tuple[str, ...]
    call: Callable[..., dict[str, Any]]
    moved: Bytes
    batch: int

    def lower(self, calls: int, **how: Any) -> jax.stages.Lowered:
        """Calls one after the other."""

        def run(changing, given):
            def body(i, changing):
                # Or XLA would find that plain JAX computes the same in every turn.
                turned = {"slots": (given["slots"] + i) % self.batch}
                return self.call(given | changing | turned, **how)

            return jax.lax.fori_loop(0, calls, body, changing)

        return jax.jit(run, donate_argnums=0).lower(*self.split(self.shapes))

    def split(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What changes, and what stays."""
        return {name: given[name] for name in self.changes}, {k: v for k, v in given.items() if k not in self.changes}


def ops(sizes: Sizes) -> Results:
    """Attention, T by T, then the convolution."""
    for tokens in sizes.tokens:
        yield from _timed(
            [_attention(model, tokens, *each) for each in sizes.contexts for model in sizes.models], sizes
        )
    yield from _timed(
        [_convolution(model, sizes.tokens[-1], batch) for batch in sizes.batches for model in sizes.models], sizes
    )


def over_copy(seconds: float, moved: Bytes, rows: int, copy_speed: float, per: int = 1) -> dict[str, float]:
    """What a time means.

    Args:
        seconds: of `rows` rows.
        moved: by one of them.
        rows: of all layers.
        copy_speed: bytes a second, read or written.
        per: how many layers that was.
    """
    speed = rows * moved.moved / seconds
    return {
        "microseconds_per_layer": rounded(seconds / per * 1e6),
        "GB_per_s": rounded(speed / 1e9),
        "of_copy": rounded(speed / copy_speed),
        "over_floor": rounded(seconds * copy_speed / (rows * moved.floor)),
    }


def _timed(cases: list[Case], sizes: Sizes) -> Results:
    ways = [[how for _, how in runnable(case.op, False) if how is not None] for case in cases]
    programs = {
        (number, how["implementation"]): functools.partial(case.lower, sizes.calls, **how)
        for number, case in enumerate(cases)
        for how in ways[number]
    }
    compiled = compile_all(programs)
    for number, case in enumerate(cases):
        for how in ways[number]:
            program = compiled[number, how["implementation"]]
            label = {"op": case.op, "implementation": how["implementation"]} | case.label
            yield attempt(label, functools.partial(_measured, case, program, sizes))


def _measured(case: Case, program: Callable[[], Any], sizes: Sizes) -> dict[str, Any]:
    needed, free = total_bytes(case.shapes), free_bytes()
    if needed > 0.9 * free:
        return {"left_out": f"it needs {needed:,} bytes, but {free:,} are free"}
    given = fill(case.shapes)
    rows = jnp.arange(case.batch, dtype=jnp.int32)
    given |= {"slots": rows} | {name: jnp.full_like(rows, value) for name, value in case.label.items() if name in given}
    changing, staying = case.split(given)

    def run():
        nonlocal changing
        changing = program()(changing, staying)
        return changing

    copy = copying(sizes.copied, 2)
    samples = measure({"op": lambda: run, "copy": lambda: copy}, sizes.rounds)
    copy_speed = 2 * 2 * sizes.copied / samples.median("copy")
    found = over_copy(samples.median("op") / sizes.calls, case.moved, case.batch, copy_speed)
    return {"copy_GB_per_s": rounded(copy_speed / 1e9)} | found


def _attention(model: Model, tokens: int, batch: int, context: int) -> Case:
    max_len = context + tokens

    def call(given, **how):
        given = {name: value for name, value in given.items() if name != "outputs"}
        return {"outputs": decode_attention(**given, scale=model.attention.head_dim**-0.5, **how)}

    shapes = attention_shapes.arguments(model.attention, batch, max_len, batch, tokens)
    shapes["outputs"] = shapes["query"]
    label = {"shape": model.name, "T": tokens, "batch": batch, "lengths": context, "num_tokens": tokens}
    moved = byte_model.attention(model, tokens, batch, context, max_len)
    return Case("decode_attention", label, shapes, ("outputs",), call, moved, batch)


def _convolution(model: Model, tokens: int, batch: int) -> Case:
    shape = conv_shapes.ConvShape(1, model.channels, model.conv_width)

    def call(given, **how):
        given = {name: value for name, value in given.items() if name != "outputs"}
        result = causal_conv1d_update(**given, layer=0, **how)
        return {"outputs": result.y, "conv_inputs": result.conv_inputs}

    shapes = conv_shapes.arguments(shape, batch, batch, tokens, record=True)
    shapes["outputs"] = shapes["x"]
    label = {"shape": model.name, "T": tokens, "batch": batch}
    # The pass alone: window and inputs read, inputs and outputs written.
    row = model.channels * byte_model.INPUT
    window = (model.conv_width - 1) * row + (model.conv_width + 1) * row / batch
    moved = Bytes(window + tokens * row, 2 * tokens * row, window + 2 * tokens * row)
    return Case("causal_conv1d_update", label, shapes, ("outputs", "conv_inputs"), call, moved, batch)
