"""The two ops on a device: against their definition, against plain JAX at published shapes, and against a copy."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ops
from benchmarks.gpu_report import Results
from benchmarks.timing import measure, rounded
from pallas_kernels import dispatch
from pallas_kernels.state_commit.shapes import SHAPES, CommitShape
from tests.pallas_kernels import oracle


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        small, dtypes: states and dtypes of small arguments.
        shapes: of the models.
        slots, batch, widths: S, B and the T to try; tracked sets need 2 B <= S.
        memory_share: of the device's free memory that one call may take.
        calls, rounds: of timings.
        interpret: whether GPU kernels are interpreted where the device cannot run them.
    """

    small: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, tuple[str, str]]
    shapes: Mapping[str, CommitShape]
    slots: int
    batch: int
    widths: tuple[int, ...]
    memory_share: float
    calls: int
    rounds: int
    interpret: bool


FULL = Sizes(
    small={"odd": (3, 5, 7), "even": (2, 8, 16)},
    dtypes={"f32, bf16": ("f32", "bf16"), "bf16": ("bf16", "bf16"), "f16": ("f16", "f16")},
    shapes=SHAPES, slots=193, batch=64, widths=(5, 17), memory_share=0.8, calls=10, rounds=7, interpret=False,
)  # fmt: skip
TINY = CommitShape(layers=2, state=(2, 8, 16), channels=48, conv_width=4, conv_dtype=jnp.float32)
QUICK = Sizes(
    small={"odd": (3, 5, 7)}, dtypes={"f32, bf16": ("f32", "bf16")}, shapes={"tiny": TINY}, slots=13, batch=4,
    widths=(3,), memory_share=0.5, calls=2, rounds=2, interpret=True,
)  # fmt: skip


def small(sizes: Sizes) -> Results:
    """Random bits and indices, some of them out of range: every byte of the pools must be as the definition says."""
    for op in ops.OPS:
        for name, static in runnable(op, sizes.interpret):
            if static is None:
                yield {"op": op, "implementation": name, "cannot_run": True}
                continue
            for kind, dtypes in sizes.dtypes.items():
                for tree in (False, True) if op == "state_commit" else (False,):
                    rng = np.random.default_rng(7)
                    wrong = [
                        case for case, x in sizes.small.items() if not _as_defined(op, rng, x, dtypes, tree, static)
                    ]
                    yield {
                        "op": op,
                        "implementation": name,
                        "dtypes": kind,
                        "tree": tree,
                        "ok": not wrong,
                        **({"wrong": wrong} if wrong else {}),
                    }


def published(sizes: Sizes) -> Results:
    """Kernels against plain JAX on the same device, bit for bit, with both index sets and pools as large as fit."""
    for model, shape in sizes.shapes.items():
        for op, width, tree in _cases(sizes):
            fitting = _fit(op, shape, sizes, width, pools=2)
            options = {"tracked": True, "tree": tree}

            def call(static, fitting=fitting, op=op, width=width, options=options):
                return ops.in_place(op, **static)(
                    ops.arguments(op, fitting, sizes.slots, sizes.batch, width, **options)
                )

            expected = call({"implementation": "xla"})
            for name, static in runnable(op, sizes.interpret):
                if name != "xla" and static is not None:
                    yield {
                        "op": op,
                        "implementation": name,
                        "shape": model,
                        "layers": fitting.layers,
                        "T": width,
                        "tree": tree,
                        "pool_elements": max(leaf.size for leaf in jax.tree.leaves(expected)),
                        "ok": bool(ops.same_bits(expected, call(static))),
                    }


def bandwidth(sizes: Sizes) -> Results:
    """Bytes read and written a second, and their share of what a copy of as many bytes reaches here."""
    for model, shape in sizes.shapes.items():
        for op, width, tree in _cases(sizes):
            fitting = _fit(op, shape, sizes, width, pools=1)
            moved = ops.moved_bytes(op, fitting, sizes.batch, tracked=True)
            for name, static in runnable(op, sizes.interpret):
                if static is None or (sizes.interpret and name != "xla"):
                    continue
                given = ops.arguments(op, fitting, sizes.slots, sizes.batch, width, tracked=True, tree=tree)
                run, copy = ops.advancing(op, given, sizes.calls, **static), ops.copying(moved, sizes.calls)
                samples = measure({"op": lambda run=run: run, "copy": lambda copy=copy: copy}, sizes.rounds)
                yield {
                    "op": op,
                    "implementation": name,
                    "shape": model,
                    "layers": fitting.layers,
                    "T": width,
                    "tree": tree,
                    "GB_per_s": rounded(2 * moved * sizes.calls / samples.median("op") / 1e9),
                    "copy_GB_per_s": rounded(2 * moved * sizes.calls / samples.median("copy") / 1e9),
                    "of_copy": rounded(samples.ratio("copy", "op")),
                }
                del given, run, copy


def _cases(sizes: Sizes) -> Iterator[tuple[str, int, bool]]:
    """(op, T, tree); what a generation runs comes first."""
    for width in sizes.widths:
        yield "state_commit", width, False
    yield "state_commit", sizes.widths[-1], True
    yield "state_scatter", sizes.widths[0], False


def runnable(op: str, interpret: bool) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each implementation with the options that run it here, interpreted if need be; None where nothing does."""
    for name in dispatch.OPS[op]:
        interpreted = interpret and name != "xla" and jax.default_backend() != "gpu"
        try:
            dispatch.resolve(op, name, interpreted)
        except NotImplementedError:
            yield name, None
        else:
            yield name, {"implementation": name} | ({"interpret": True} if interpreted else {})


def free_bytes() -> int:
    """Of the device's memory; 2 GiB where it does not say."""
    (device,) = jnp.zeros(()).devices()
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else 2**31


def _as_defined(op: str, rng: Any, state: tuple[int, ...], dtypes: tuple[str, str], tree: bool, static: Any) -> bool:
    L, S, R, T, B, W, C = 2, 9, 5, 4, 4, 4, 13
    ssm_dtype, conv_dtype = (oracle.DTYPES[name] for name in dtypes)
    ssm, states = (oracle.random_values(rng, (L, *lead, *state), ssm_dtype) for lead in ((S,), (R, T)))
    order = rng.permutation(S).astype(np.int32)
    sets = oracle.Sets(
        slots=np.where(rng.random(B) < 0.2, -1, order[:B]).astype(np.int32),
        steps=rng.integers(-1, T + 1, B).astype(np.int32),
        rows=rng.integers(0, R + 1, B).astype(np.int32),
        track_slots=order[B : 2 * B],
        track_steps=rng.integers(-1, T, B).astype(np.int32),
    )
    indices = {name: jnp.asarray(value) for name, value in sets._asdict().items()}
    if op == "state_scatter":
        given: dict[str, Any] = {"dst": jnp.asarray(ssm), "src": jnp.asarray(states)}
        expected: Any = oracle.scatter(ssm, states, sets)
    else:
        conv = oracle.random_values(rng, (L, S, W - 1, C), conv_dtype)
        inputs = oracle.random_values(rng, (L, R, T, C), conv_dtype)
        parents = oracle.random_parents(rng, B, T) if tree else None
        given = {"ssm": ssm, "conv": conv, "ssm_states": states, "conv_inputs": inputs}
        given = {name: jnp.asarray(value) for name, value in given.items()}
        if tree:
            indices["parents"] = jnp.asarray(parents)
        expected = oracle.commit(ssm, conv, states, inputs, sets, parents)
    actual = ops.in_place(op, **static)(given | indices)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(oracle.bits(a), oracle.bits(b)) for a, b in pairs)


def _fit(op: str, shape: CommitShape, sizes: Sizes, width: int, pools: int) -> CommitShape:
    """The shape with as many layers as fit: pools, snapshots, and twice what is moved for temporaries or a copy."""
    free = free_bytes()
    layer = dataclasses.replace(shape, layers=1)
    shapes = ops.OPS[op][1].arguments(layer, sizes.slots, sizes.batch, width, tracked=True)
    needed = ops.total_bytes(shapes) + (pools - 1) * ops.total_bytes(shapes, ops.OPS[op][2])
    needed += 2 * ops.moved_bytes(op, layer, sizes.batch, tracked=True)
    layers = int(sizes.memory_share * free / needed)
    if layers < 1:
        raise MemoryError(f"one layer needs {needed:,} bytes, but {free:,} are free")
    return dataclasses.replace(shape, layers=min(shape.layers, layers))
