"""The recurrent ops and attention on a device: every implementation against plain JAX, on arguments full of NaN."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_compile import compile_all
from benchmarks.gpu_draws import draw
from benchmarks.gpu_ops import free_bytes, runnable
from benchmarks.gpu_passes import DELTA, SSM, Recurrence, shape_of
from benchmarks.gpu_report import Results, attempt
from benchmarks.ops import total_bytes
from benchmarks.published import MODELS, Model
from pallas_kernels import causal_conv1d_update, decode_attention
from pallas_kernels.causal_conv1d_update import shapes as conv_shapes
from pallas_kernels.decode_attention import shapes as attention_shapes
from pallas_kernels.gated_delta_update.shapes import DeltaShape
from pallas_kernels.selective_state_update.shapes import SSMShape

Kind = tuple[str, str, bool]  # form, what a pass leaves behind, whether it is a tree
_VERIFIES: tuple[Kind, ...] = tuple(
    (form, keep, tree) for form in ("step", "chunk") for tree in (False, True) for keep in ("ring", "snapshots")
)
BUFFERS = {"ring": ("state", "ring"), "snapshots": ("snapshots",), "state": ("state",)}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to check.

    Attributes:
        op: its name.
        label: what the report calls it.
        call: from arguments and an implementation's options to everything that is compared, by name.
        shapes: of the arguments.
        buffers: those that are donated, and returned by `call`.
        layer: of the pools.
    """

    op: str
    label: dict[str, Any]
    call: Callable[..., dict[str, Any]]
    shapes: dict[str, Any]
    buffers: tuple[str, ...] = ()
    layer: int = 0

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Buffers, and the rest."""
        return self._split(draw(self.shapes, self.layer, padding=True))

    def lower(self, **how: Any) -> jax.stages.Lowered:
        """The program of an implementation."""

        def run(buffers, others):
            return self.call(buffers | others, **how)

        rows = {"num_tokens": jax.ShapeDtypeStruct(self.shapes["slots"].shape, jnp.int32)}
        return jax.jit(run, donate_argnums=0).lower(*self._split(self.shapes | rows))

    def _split(self, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        others = {name: value for name, value in given.items() if name not in self.buffers}
        return {name: given[name] for name in self.buffers}, others


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the arguments are.

    Attributes:
        dtypes: of small arguments; each in turn.
        recurrences: small layers, odd in every dimension.
        kinds: of passes over small arguments.
        models: published ones.
        slots, batch, max_len: S, B, M, for published ones.
        chain, nodes: T of chains and of trees.
        memory_share: of the device's free memory that one case may take.
        interpret: whether GPU kernels are interpreted where the device cannot run them.
    """

    dtypes: tuple[str, ...]
    recurrences: tuple[tuple[Recurrence, Any], ...]
    kinds: tuple[Kind, ...]
    models: tuple[Model, ...]
    slots: int
    batch: int
    max_len: int
    chain: int
    nodes: int
    memory_share: float
    interpret: bool


def named(*names: str) -> tuple[Model, ...]:
    """Published models, in that order."""
    return tuple(model for name in names for model in MODELS if model.name == name)


# Qwen3.5-35B has the recurrent layers of Qwen3-Next.
FULL = Sizes(
    dtypes=("float32", "bfloat16", "float16"),
    recurrences=(
        (SSM, SSMShape(layers=2, heads=4, head_dim=33, state=40, groups=2)),
        (DELTA, DeltaShape(layers=2, key_heads=2, heads=4, value_dim=5, key_dim=6)),
        (DELTA, DeltaShape(layers=2, key_heads=2, heads=4, value_dim=35, key_dim=6, per_channel=True)),
    ),
    kinds=(*_VERIFIES, *itertools.product(("step", "chunk"), ("state", "nothing"), (False,))),
    models=named("nemotron-3-super", "qwen3-next", "granite-4-h-small", "falcon-h1-34b"),
    slots=193, batch=6, max_len=2048, chain=4, nodes=8, memory_share=0.8, interpret=False,
)  # fmt: skip
QUICK = dataclasses.replace(
    FULL,
    dtypes=("bfloat16",),
    recurrences=(
        (SSM, SSMShape(layers=2, heads=2, head_dim=3, state=5, groups=1)),
        (DELTA, DeltaShape(layers=2, key_heads=1, heads=2, value_dim=3, key_dim=5)),
    ),
    kinds=(("step", "ring", False), ("step", "snapshots", True), ("chunk", "ring", True)),
    models=(),
    chain=2,
    nodes=3,
    interpret=True,
)


def small(sizes: Sizes) -> Results:
    """Odd sizes: each implementation on this device against plain JAX on this machine's CPU."""
    for dtype in sizes.dtypes:
        for cases in _small(jnp.dtype(dtype), sizes):
            yield from _check(cases, sizes, {"dtype": dtype}, reference=jax.devices("cpu")[0])


def published(sizes: Sizes) -> Results:
    """Kernels against plain JAX on the same device, in pools of as many layers as fit."""
    for model in sizes.models:
        yield from _check(_published(model, sizes), sizes, {"shape": model.name}, reference=None)


def _small(dtype: Any, sizes: Sizes) -> Iterator[list[Case]]:
    """One op after the other."""
    for op, shape in sizes.recurrences:
        shape = dataclasses.replace(shape, state_dtype=dtype, dtype=dtype)
        forms = dict.fromkeys(form for form, _, _ in sizes.kinds)
        yield [
            *(_recurrence(op, shape, *kind, sizes.nodes if kind[2] else sizes.chain, 7, 6) for kind in sizes.kinds),
            *(_fold(op, shape, form, sizes.chain, 7, 6) for form in forms),
        ]
    conv = conv_shapes.ConvShape(layers=2, channels=37, dtype=dtype)
    attention = attention_shapes.AttentionShape(layers=1, heads=6, kv_heads=2, head_dim=5, dtype=dtype)
    yield [
        *(_convolution(conv, *kind, 7, 6) for kind in _conv_kinds(sizes)),
        *(_attention(attention, tokens, 7, 6, 300, tree) for tree, tokens in _windows(sizes)),
    ]


def _published(model: Model, sizes: Sizes) -> list[Case]:
    """What a generation runs, with inputs in bfloat16 and states in float32."""
    op, shape = shape_of(model.recurrence, 1)
    S, B = sizes.slots, sizes.batch
    fitted = _fit(op, shape, model.layers, sizes)
    conv = conv_shapes.ConvShape(model.layers, model.channels, model.conv_width)
    return [
        *(_recurrence(op, fitted, *kind, sizes.nodes if kind[2] else sizes.chain, S, B) for kind in _VERIFIES),
        _recurrence(op, fitted, "step", "state", False, 1, S, B),
        _fold(op, fitted, "step", sizes.chain, S, B),
        *(_convolution(conv, *kind, S, B) for kind in _conv_kinds(sizes)),
        *(_attention(model.attention, tokens, S, B, sizes.max_len, tree) for tree, tokens in _windows(sizes)),
    ]


def _windows(sizes: Sizes) -> tuple[tuple[bool, int], ...]:
    return (False, sizes.chain), (True, sizes.nodes)


def _conv_kinds(sizes: Sizes) -> tuple[tuple[int, bool, bool], ...]:
    """T, whether inputs are recorded, whether it is a tree."""
    kinds = (sizes.chain, True, False), (sizes.chain, False, False), (sizes.nodes, True, True)
    return kinds[1:] if sizes.interpret else kinds


def _recurrence(op: Recurrence, shape: Any, form: str, keep: str, tree: bool, tokens: int, S: int, B: int) -> Case:
    length = 2 * tokens + 1

    def call(given, **how):
        result = op.run(given, keep, layer, form=form, **how)
        kept = {name: getattr(result, name) for name in BUFFERS.get(keep, ())}
        return kept | {"outputs": result[0]}

    shapes = op.shapes(shape, S, B, tokens, keep=keep, tree=tree, length=length)
    layer = shape.layers - 1
    label = {"form": form, "keep": keep, "tree": tree, "T": tokens, "per_channel": getattr(shape, "per_channel", False)}
    return Case(op.name, label, call, shapes, BUFFERS.get(keep, ()), layer)


def _fold(op: Recurrence, shape: Any, form: str, tokens: int, S: int, B: int) -> Case:
    layer = shape.layers - 1

    def call(given, **how):
        return {"state": op.fold(given, layer, form=form, **how)}

    shapes = op.shapes(shape, S, B, tokens, keep="ring", length=4 * tokens)
    return Case(op.name, {"form": form, "keep": "fold_history"}, call, shapes, ("state",), layer)


def _convolution(shape: Any, tokens: int, record: bool, tree: bool, S: int, B: int) -> Case:
    layer = shape.layers - 1

    def call(given, **how):
        given = given if not record else {name: value for name, value in given.items() if name != "num_tokens"}
        result = causal_conv1d_update(**given, layer=layer, **how)
        written = {"conv_inputs": result.conv_inputs} if record else {"conv_state": result.conv_state}
        return written | {"outputs": result.y}

    shapes = conv_shapes.arguments(shape, S, B, tokens, record=record, tree=tree)
    label = {"keep": "inputs" if record else "state", "tree": tree, "T": tokens}
    buffers = ("conv_inputs",) if record else ("conv_state",)
    return Case("causal_conv1d_update", label, call, shapes, buffers, layer)


def _attention(shape: Any, tokens: int, S: int, B: int, max_len: int, tree: bool) -> Case:
    def call(given, **how):
        return {"outputs": decode_attention(**given, scale=shape.head_dim**-0.5, **how)}

    shapes = attention_shapes.arguments(shape, S, max_len, B, tokens, tree=tree)
    return Case("decode_attention", {"tree": tree, "T": tokens, "max_len": max_len}, call, shapes)


def _check(cases: list[Case], sizes: Sizes, label: dict[str, Any], reference: Any) -> Results:
    """Each implementation against plain JAX on the device `reference`; None for the one that all of them run on."""
    ways = [list(_ways(case, sizes, reference)) for case in cases]
    programs: dict[tuple[int, str], Callable[[], jax.stages.Lowered]] = {}
    for number, case in enumerate(cases):
        if ways[number]:
            programs[number, "reference"] = functools.partial(_on, reference, case.lower, implementation="xla")
        for how in ways[number]:
            programs[number, how["implementation"]] = functools.partial(case.lower, **how)
    compiled = compile_all(programs)
    for number, case in enumerate(cases):
        for how in ways[number]:
            name = how["implementation"]
            pair = compiled[number, name], compiled[number, "reference"]
            found = functools.partial(_compare, case, *pair, reference)
            yield attempt({"op": case.op, "implementation": name} | label | case.label, found)


def _on(device: Any, function: Callable[..., Any], **options: Any) -> Any:
    with jax.default_device(device):
        return function(**options)


def _ways(case: Case, sizes: Sizes, reference: Any) -> Iterator[dict[str, Any]]:
    """Options of the implementations that run here, but for the one that would be compared with itself."""
    for name, how in runnable(case.op, sizes.interpret):
        same = name == "xla" and (reference is None or reference.platform == jax.default_backend())
        if how is not None and not same:
            yield how


def _compare(case: Case, program: Callable, expected: Callable, reference: Any) -> dict[str, Any]:
    """Largest differences, over the largest number there; infinite where only one side is NaN."""
    theirs = expected()(*_on(reference, case.arguments))
    if reference is not None:
        theirs = jax.device_put(theirs, jax.devices()[0])
    buffers, rows = case.arguments()
    mine = program()(buffers, rows)
    errors = jax.device_get(_differences(mine, theirs, _real(case, rows)))
    names = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(theirs)}
    limits = {name: _limit(dtype) for name, dtype in names.items()}
    errors = dict(zip(names, map(float, jax.tree.leaves(errors)), strict=True))
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    return {"ok": not wrong, "worst": max(errors.values())} | ({"wrong": wrong, "limits": limits} if wrong else {})


def _limit(dtype: Any) -> float:
    """Sums of float32 in another order, and a few roundings to 16 bits."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return 1e-5 + (4 * float(jnp.finfo(dtype).eps) if dtype != jnp.float32 else 0)


def _real(case: Case, rows: dict[str, Any]) -> jax.Array:
    """`[B, T]`, tokens that are one of a row with a slot."""
    pools = {"causal_conv1d_update": ("conv_state", 1), "decode_attention": ("keys", 0)}
    name, axis = pools.get(case.op, ("state", 1))
    has_slot = (rows["slots"] >= 0) & (rows["slots"] < case.shapes[name].shape[axis])
    width = next(case.shapes[name].shape[1] for name in ("x", "q", "query") if name in case.shapes)
    return has_slot[:, None] & (jnp.arange(width) < rows["num_tokens"][:, None])


@jax.jit
def _differences(mine: dict[str, Any], theirs: dict[str, Any], real: jax.Array) -> dict[str, Any]:
    by_token = {"outputs": 0, "snapshots": 1, "conv_inputs": 1}  # axis of the rows

    def kept(name, leaf):
        if name not in by_token:
            return leaf
        axes = by_token[name]
        shape = (*[1] * axes, *real.shape, *[1] * (leaf.ndim - axes - 2))
        return jnp.where(real.reshape(shape), leaf, jnp.zeros((), leaf.dtype))

    return {
        name: jax.tree.map(lambda a, b, name=name: _difference(kept(name, a), kept(name, b)), mine[name], theirs[name])
        for name in theirs
    }


def _difference(mine: jax.Array, theirs: jax.Array) -> jax.Array:
    mine, theirs = mine.astype(jnp.float32), theirs.astype(jnp.float32)
    missing = jnp.isnan(theirs)
    error = jnp.max(jnp.where(missing, 0, jnp.abs(mine - theirs)), initial=0)
    largest = jnp.max(jnp.where(missing, 0, jnp.abs(theirs)), initial=0)
    alike = jnp.all(jnp.isnan(mine) == missing)
    return jnp.where(alike, error / jnp.maximum(largest, 1e-30), jnp.inf)


def _fit(op: Recurrence, shape: Any, layers: int, sizes: Sizes) -> Any:
    """The shape with as many layers as fit: what two implementations leave behind, and XLA's temporaries."""
    window = sizes.slots, sizes.batch, sizes.nodes
    each = max(
        total_bytes(op.shapes(shape, *window, keep="snapshots")),
        total_bytes(op.shapes(shape, *window, keep="ring", length=2 * sizes.nodes + 1)),
    )
    snapshots = op.shapes(shape, *window, keep="snapshots")["snapshots"]
    temporaries = 4 * 4 * snapshots.size
    fitting = int((sizes.memory_share * free_bytes() - temporaries) / (2 * each))
    if fitting < 1:
        raise MemoryError(f"one layer needs {2 * each + temporaries:,} bytes, but {free_bytes():,} are free")
    return dataclasses.replace(shape, layers=min(layers, fitting))
