"""Verify and commit of published recurrent layers under SNAPSHOT and REPLAY, and from which batch on REPLAY pays.

Steps follow one another in one program that updates its buffers in place. Each accepts 70 % of T on average, bonus
included, so that the cursors of the ring are where they are at work. Steps take turns on so many slots that no state is
still in a cache when its turn comes again; snapshots may be, at small batches, which is in their favour. What a step
does once for all layers is shared by few layers here, and by dozens in a model.

S bytes of a row's state in one layer, B rows, T tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import byte_model
from benchmarks.gpu_compile import compile_all
from benchmarks.gpu_draws import fill
from benchmarks.gpu_kernels import named
from benchmarks.gpu_ops import free_bytes
from benchmarks.gpu_passes import Carry, accepted_nodes, replay_step, shape_of, snapshot_step
from benchmarks.gpu_report import Results, attempt
from benchmarks.gpu_speed import over_copy
from benchmarks.ops import copying, total_bytes
from benchmarks.published import GatedDelta, Mamba2, Model
from benchmarks.timing import measure, rounded
from pallas_kernels import dispatch

STATE_BYTES = 4  # of an element


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        models: one of each kind of recurrent layer.
        tokens, batches: T and B, what matters first.
        xla: B at which plain JAX is measured too.
        chunked: B at which the chunked form is.
        cold: bytes of states that no cache holds.
        traffic: bytes that a timed run moves, or eight steps if these move more.
        copied: bytes of the copy.
        rounds: of timings.
        memory_share: of the device's free memory that one case may take.
    """

    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    xla: tuple[int, ...]
    chunked: tuple[int, ...]
    cold: int
    traffic: int
    copied: int
    rounds: int
    memory_share: float


FULL = Sizes(
    models=named("nemotron-3-super", "qwen3-next", "granite-4-h-small", "falcon-h1-34b"),
    tokens=(4, 8, 16, 1), batches=(1, 256, 8, 32, 512, 128), xla=(8, 256), chunked=(256,),
    cold=2**28, traffic=2**34, copied=2**28, rounds=5, memory_share=0.9,
)  # fmt: skip
_TINY = dataclasses.replace(
    FULL.models[0], name="tiny", recurrence=Mamba2(heads=2, head_dim=3, state=5, groups=1), layers=2
)
_TINY_DELTA = dataclasses.replace(
    FULL.models[1], name="tiny delta", recurrence=GatedDelta(key_heads=1, heads=2, value_dim=3, key_dim=5), layers=2
)
QUICK = Sizes(
    models=(_TINY, _TINY_DELTA), tokens=(2,), batches=(1, 2), xla=(2,), chunked=(), cold=2**9, traffic=2**10,
    copied=2**10, rounds=1, memory_share=0.5,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model, T and B: pools of few layers, and how many steps a timed run has."""

    model: Model
    tokens: int
    batch: int
    sizes: Sizes

    @property
    def layers(self) -> int:
        """More of them where a step is so short that what it does once would stand out."""
        return min(self.model.layers, max(1, min(4, 64 // self.batch)))

    @property
    def slots(self) -> int:
        """A multiple of the batch."""
        state = self.layers * self.batch * self.model.recurrence.state_size * STATE_BYTES
        return self.batch * max(1, -(-self.sizes.cold // state))

    @property
    def steps(self) -> int:
        """Of a timed run."""
        return max(8, min(64, int(self.sizes.traffic / (self.moved("snapshot").moved * self.rows))))

    @property
    def rows(self) -> int:
        """Rows of all layers."""
        return self.layers * self.batch

    def moved(self, strategy: str) -> byte_model.Bytes:
        """Of one row and layer."""
        return byte_model.recurrence(self.model, strategy, self.tokens, STATE_BYTES)

    def shapes(self, strategy: str) -> dict[str, Any]:
        """Abstract arguments of the op."""
        op, shape = shape_of(self.model.recurrence, self.layers)
        keep = {"snapshot": "snapshots", "replay": "ring"}[strategy]
        length = byte_model.ring_length(self.tokens)
        return op.shapes(shape, self.slots, self.batch, self.tokens, keep=keep, length=length)

    def arguments(self, strategy: str) -> tuple[Carry, dict[str, Any]]:
        """What the steps update, and what they read."""
        op, _ = shape_of(self.model.recurrence, self.layers)
        given = fill(self.shapes(strategy)) | {"num_tokens": jnp.full(self.batch, self.tokens, jnp.int32)}
        rng = np.random.default_rng(0)
        given["last"] = jnp.asarray(accepted_nodes(rng, self.tokens, self.steps, self.batch))
        buffers = ("state", "snapshots" if strategy == "snapshot" else "ring")
        carry = {name: given.pop(name) for name in buffers}
        carry["outputs"] = [jnp.zeros_like(given[op.like_outputs]) for _ in range(self.layers)]
        return carry, given

    def lower(self, strategy: str, **how: Any) -> jax.stages.Lowered:
        """The steps of a timed run as one program."""
        op, _ = shape_of(self.model.recurrence, self.layers)
        step = {"snapshot": snapshot_step, "replay": replay_step}[strategy](op, **how)

        def run(carry: Carry, given: dict[str, Any]) -> Carry:
            def body(i, carry):
                slots = (i * self.batch + jnp.arange(self.batch, dtype=jnp.int32)) % self.slots
                return step(carry, given, slots, given["last"][i])

            return jax.lax.fori_loop(0, self.steps, body, carry)

        return jax.jit(run, donate_argnums=0).lower(*jax.eval_shape(functools.partial(self.arguments, strategy)))


def sweep(sizes: Sizes) -> Results:
    """Every T in turn: its cells, then its crossover, if no cell failed."""
    for tokens in sizes.tokens:
        cells = [Cell(model, tokens, batch, sizes) for batch in sizes.batches for model in sizes.models]
        cases = {cell: _cases(cell) for cell in cells}
        compiled = compile_all(
            {
                (cell, case): functools.partial(cell.lower, strategy, **how)
                for cell in cells
                for case, (strategy, how) in cases[cell].items()
            }
        )
        ratios: dict[int, list[float]] = {}
        failed = False
        for cell in cells:
            programs = {case: (strategy, compiled[cell, case]) for case, (strategy, _) in cases[cell].items()}
            label = {"shape": cell.model.name, "T": tokens, "batch": cell.batch}
            found = attempt(label, functools.partial(_measured, cell, programs))
            failed |= "error" in found
            if "replay_over_snapshot" in found:
                ratios.setdefault(cell.batch, []).append(found["replay_over_snapshot"])
            yield found
        if not failed and ratios:
            yield {"T": tokens, "crossover": crossover(ratios)}


def crossover(ratios: Mapping[int, list[float]]) -> int | None:
    """The least batch from which REPLAY is never slower, at any larger batch that was measured; None if there is none.

    Args:
        ratios: for each batch the times of REPLAY over those of SNAPSHOT, of every model.
    """
    least = None
    for batch in sorted(ratios, reverse=True):
        if max(ratios[batch]) > 1:
            break
        least = batch
    return least


def _cases(cell: Cell) -> dict[str, tuple[str, dict[str, Any]]]:
    """Strategies with the options of their ops: the device's own choice, then what it is compared with."""
    chosen: str = dispatch.resolve(cell.model.recurrence.op, None).implementation
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        strategy: (strategy, {"implementation": chosen}) for strategy in ("snapshot", "replay")
    }
    if cell.batch in cell.sizes.xla and chosen != "xla":
        cases["xla snapshot"] = "snapshot", {"implementation": "xla"}
    if cell.batch in cell.sizes.chunked:
        for strategy in ("snapshot", "replay"):
            cases[f"chunked {strategy}"] = strategy, {"implementation": chosen, "form": "chunk"}
    return cases


def _measured(cell: Cell, programs: Mapping[str, tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
    """Medians of a layer's time, bytes a second by the byte model, and ratios within rounds."""
    needed = sum(total_bytes(cell.shapes(strategy)) for strategy, _ in programs.values())
    free = cell.sizes.memory_share * free_bytes()
    if needed > free:
        return {"left_out": f"it needs {needed:,} bytes, but {int(free):,} may be used"}
    runs: dict[str, Callable[[], Any]] = {
        case: _advancing(program(), *cell.arguments(strategy)) for case, (strategy, program) in programs.items()
    }
    runs["copy"] = copying(cell.sizes.copied, 2)
    samples = measure({case: functools.partial(_as_it_is, run) for case, run in runs.items()}, cell.sizes.rounds)
    copy_speed = 2 * 2 * cell.sizes.copied / samples.median("copy")
    of_cases = {
        case: over_copy(samples.median(case) / cell.steps, cell.moved(strategy), cell.rows, copy_speed, per=cell.layers)
        for case, (strategy, _) in programs.items()
    }
    return {
        "Q": byte_model.ring_length(cell.tokens),
        "layers": cell.layers,
        "slots": cell.slots,
        "copy_GB_per_s": rounded(copy_speed / 1e9),
        "of_cases": of_cases,
        **{
            f"{case}_over_snapshot".replace(" ", "_"): rounded(samples.ratio(case, "snapshot"))
            for case in programs
            if case != "snapshot"
        },
    }


def _advancing(program: Any, carry: Carry, given: dict[str, Any]) -> Callable[[], Carry]:
    """A timed run, each going on from where the last one ended."""

    def run():
        nonlocal carry
        carry = program(carry, given)
        return carry

    return run


def _as_it_is(run: Callable[[], Any]) -> Callable[[], Any]:
    """Nothing to prepare."""
    return run
