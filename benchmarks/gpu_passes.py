"""Steps of a recurrence on a device, one after the other in one program: by snapshots, by replay, token by token.

L layers, S slots, B rows, T tokens, Q ring length.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.byte_model import ACCEPTED, ring_length
from benchmarks.gpu_draws import draw
from benchmarks.gpu_report import Results, attempt
from benchmarks.published import GatedDelta, Mamba2
from pallas_kernels import fold_history, selective_state_update, state_commit
from pallas_kernels import ring as rings
from pallas_kernels.gated_delta_update import fold_history as fold_delta_history
from pallas_kernels.gated_delta_update import gated_delta_update
from pallas_kernels.gated_delta_update import shapes as delta_shapes
from pallas_kernels.selective_state_update import shapes as ssm_shapes

Ways = Callable[[str], list[dict[str, Any]]]
Carry = dict[str, Any]
Step = Callable[[Carry, dict[str, Any], jax.Array, jax.Array], Carry]  # arguments: carry, inputs, slots, last nodes


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """One of the two recurrent ops.

    Attributes:
        name, update, fold_history: the op's.
        shapes: its abstract arguments.
        tokens: arguments that a pass has one of a token.
        weights: the layer's; constants: those of them that folding needs.
        like_outputs: the argument whose shape and dtype the outputs have.
    """

    name: str
    update: Callable
    fold_history: Callable
    shapes: Callable[..., dict[str, Any]]
    tokens: tuple[str, ...]
    weights: tuple[str, ...]
    constants: tuple[str, ...]
    like_outputs: str

    def run(self, given: dict[str, Any], keep: str, layer: int, **how: Any) -> Any:
        """A pass that leaves behind what `keep` says, `parents` making it a tree."""
        names = {"ring": ("ring", "fold"), "snapshots": ("snapshots",)}.get(keep, ())
        rows = ("num_tokens",) if self is DELTA else ()
        call = {name: given[name] for name in ("state", "slots", *self.tokens, *self.weights, *rows, *names)}
        return self.update(
            **call, parents=given.get("parents"), layer=layer, disable_state_update=keep == "nothing", **how
        )

    def fold(self, given: dict[str, Any], layer: int, **how: Any) -> jax.Array:
        """The pool with every row's history folded in."""
        constants = {name: given[name] for name in self.constants}
        return self.fold_history(given["state"], given["ring"], layer=layer, slots=given["slots"], **constants, **how)


SSM = Recurrence(
    "selective_state_update", selective_state_update, fold_history, ssm_shapes.arguments,
    tokens=("x", "dt", "B", "C"), weights=("A", "D"), constants=("A",), like_outputs="x",
)  # fmt: skip
DELTA = Recurrence(
    "gated_delta_update", gated_delta_update, fold_delta_history, delta_shapes.arguments,
    tokens=("q", "k", "v", "g", "beta"), weights=(), constants=(), like_outputs="v",
)  # fmt: skip


def shape_of(layer: Mamba2 | GatedDelta, layers: int, **dtypes: Any) -> tuple[Recurrence, Any]:
    """The op of a published layer, and its shape there."""
    sizes = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer) if field.name != "op"}
    if isinstance(layer, Mamba2):
        return SSM, ssm_shapes.SSMShape(layers=layers, **sizes, **dtypes)
    return DELTA, delta_shapes.DeltaShape(layers=layers, **sizes, **dtypes)


def accepted_nodes(rng: np.random.Generator, tokens: int, *shape: int) -> np.ndarray:
    """The last accepted node of each pass: ACCEPTED of T tokens on average, the root always."""
    chance = max(0.0, (ACCEPTED * tokens - 1) / max(tokens - 1, 1))
    return rng.binomial(tokens - 1, chance, shape).astype(np.int32)


def snapshot_step(op: Recurrence, **how: Any) -> Step:
    """A verify that writes a state after every token in all layers, and the commit of the accepted one."""
    commit = {name: value for name, value in how.items() if name != "form"}

    def step(carry, inputs, slots, last):
        state, snapshots, outputs = carry["state"], carry["snapshots"], []
        for layer in range(state.shape[0]):
            result = op.run(
                inputs | {"state": state, "snapshots": snapshots, "slots": slots}, "snapshots", layer, **how
            )
            outputs.append(result[0])
            snapshots = result.snapshots
        state, _ = state_commit(state, (), snapshots, (), slots, last, **commit)
        return {"state": state, "snapshots": snapshots, "outputs": outputs}

    return step


def replay_step(op: Recurrence, **how: Any) -> Step:
    """A verify that keeps the inputs of all layers, and the cursors' move."""

    def step(carry, inputs, slots, last):
        state, ring, outputs = carry["state"], carry["ring"], []
        tokens = inputs[op.tokens[0]].shape[1]
        fold = rings.must_fold(rings.rows_of(ring.counts, slots), tokens, tokens, ring.length)
        for layer in range(state.shape[0]):
            given = inputs | {"state": state, "ring": ring, "fold": fold, "slots": slots}
            result = op.run(given, "ring", layer, **how)
            outputs.append(result[0])
            state, ring = result.state, result.ring
        return {"state": state, "ring": rings.extend(ring, slots, fold, last + 1), "outputs": outputs}

    return step


def decode_step(op: Recurrence, **how: Any) -> Step:
    """The accepted tokens one by one, each advancing the states in place."""

    def step(carry, inputs, slots, last):
        state, outputs = carry["state"], []
        for layer in range(state.shape[0]):
            columns = []
            for t in range(inputs[op.tokens[0]].shape[1]):
                token = {name: inputs[name][:, t : t + 1] for name in op.tokens}
                rows = {"slots": jnp.where(t <= last, slots, -1), "num_tokens": jnp.ones_like(slots)}
                result = op.run(inputs | token | rows | {"state": state}, "state", layer, **how)
                columns.append(result[0])
                state = result.state
            outputs.append(jnp.concatenate(columns, axis=1))
        return {"state": state, "outputs": outputs}

    return step


def same_bits(
    layers: tuple[tuple[str, Mamba2 | GatedDelta], ...], steps: int, tokens: int, dtypes: tuple[str, ...], ways: Ways
) -> Results:
    """Steps that accept different numbers of tokens: snapshots, replay and decoding must have the same bits.

    Args:
        layers: named recurrent layers.
        steps: passes in a row.
        tokens: T.
        dtypes: of states and inputs.
        ways: for an op's name, the options of each implementation to try.
    """
    for (name, layer), dtype in ((each, dtype) for each in layers for dtype in dtypes):
        op, shape = shape_of(layer, 1, state_dtype=jnp.dtype(dtype), dtype=jnp.dtype(dtype))
        for how in ways(op.name):
            case = {"op": op.name, "shape": name, "dtype": dtype, "implementation": how["implementation"]}
            yield attempt(case, functools.partial(_same_bits, op, shape, steps, tokens, how))


def _same_bits(op: Recurrence, shape: Any, steps: int, tokens: int, how: dict[str, Any]) -> dict[str, Any]:
    rows, length = 3, ring_length(tokens)
    abstract = op.shapes(shape, rows + 2, rows, steps * tokens)
    given = draw(abstract, 0, padding=False) | {"num_tokens": jnp.full(rows, tokens, jnp.int32)}
    last = jnp.asarray(accepted_nodes(np.random.default_rng(0), tokens, steps, rows))
    snapshots, kept = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype),
        (
            op.shapes(shape, rows + 2, rows, tokens, keep="snapshots")["snapshots"],
            op.shapes(shape, rows + 2, rows, tokens, keep="ring", length=length)["ring"].inputs,
        ),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(make, carry):
        step = make(op, **how)

        def body(i, held):
            carry, outputs = held
            inputs = {name: jax.lax.dynamic_slice_in_dim(given[name], i * tokens, tokens, axis=1) for name in op.tokens}
            carry = step(carry, given | inputs, given["slots"], last[i])
            (output,) = carry.pop("outputs")
            return carry, jax.lax.dynamic_update_slice_in_dim(outputs, output, i * tokens, axis=1)

        carry, outputs = jax.lax.fori_loop(0, steps, body, (carry, jnp.zeros_like(given[op.like_outputs])))
        if "ring" in carry:
            carry["state"] = op.fold(given | carry, 0, **how)
        real = (jnp.arange(tokens) <= last.T[..., None]).reshape(rows, -1)
        return carry["state"], jnp.where(real[..., None, None], outputs, 0)

    found = {
        "decode": run(decode_step, {"state": given["state"]}),
        "snapshot": run(snapshot_step, {"state": given["state"], "snapshots": snapshots}),
        "replay": run(replay_step, {"state": given["state"], "ring": rings.Ring.empty(kept)}),
    }
    same = {
        way: [
            bool(jnp.array_equal(mine, decoded, equal_nan=True))
            for mine, decoded in zip(result, found["decode"], strict=True)
        ]
        for way, result in found.items()
        if way != "decode"
    }
    finite = bool(jnp.all(jnp.isfinite(found["decode"][1])))
    return {"ok": finite and all(map(all, same.values())), "states and outputs as decoding's": same, "finite": finite}
