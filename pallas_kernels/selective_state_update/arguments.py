"""What the op's arguments must be while tracing, and what it returns.

L layers, S slots, B rows, T tokens of a row, H heads, P head dim, N state, G groups, Q ring length.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_shape
from pallas_kernels.ring import Ring
from pallas_kernels.selective_state_update.recurrence import SSMInputs

Form = Literal["step", "chunk"]

_STATE_DTYPES = ("float32", "bfloat16", "float16")


class StateUpdate(NamedTuple):
    """What a pass returns; a buffer that was not given is None, and one that the pass does not write is as it was.

    Attributes:
        y: `[B, T, H, P]` outputs, in x's dtype.
        state: `[L, S, H, P, N]`.
        snapshots: `[L, B, T, H, P, N]`.
        ring: with the pass's inputs after each row's history; starts, counts and order do not change.
    """

    y: jax.Array
    state: jax.Array
    snapshots: jax.Array | None = None
    ring: Ring | None = None


def check_form(op: str, form: Any) -> None:
    """Refuses a form that does not exist."""
    if form not in get_args(Form):
        raise ValueError(f"{op}: form is {form!r}, expected 'step' or 'chunk'")


def check_layer(op: str, layer: Any, layers: int) -> None:
    """The layer is a static index into the pool."""
    if not isinstance(layer, int) or not 0 <= layer < layers:
        raise ValueError(f"{op}: layer is {layer!r}, expected an integer in 0..{layers - 1}, known while tracing")


def check_state(op: str, state: jax.Array) -> None:
    """The pool `[L, S, H, P, N]`."""
    check_shape(op, "state", state, ("L", "S", "H", "P", "N"))
    if str(state.dtype) not in _STATE_DTYPES:
        raise ValueError(f"{op}: state is {state.dtype}, expected one of {', '.join(_STATE_DTYPES)}")


def check_inputs(op: str, state: jax.Array, inputs: SSMInputs, A: jax.Array, D: jax.Array) -> tuple[int, int]:
    """Inputs and per-head weights against the pool; returns (B, T)."""
    _, _, H, P, N = state.shape
    check_shape(op, "x", inputs.x, ("B", "T", H, P))
    batch, tokens = window = inputs.x.shape[:2]
    check_shape(op, "dt", inputs.dt, (*window, H))
    check_shape(op, "B", inputs.B, (*window, "G", N))
    G = inputs.B.shape[2]
    if G == 0 or H % G:
        raise ValueError(f"{op}: B has G = {G} groups, expected a divisor of H = {H}")
    if inputs.C is None:
        raise ValueError(f"{op}: C is None, expected [B, T, G, N]")
    check_shape(op, "C", inputs.C, (*window, G, N))
    check_heads(op, H, A=A, D=D)
    check_dtype(op, "dt", inputs.dt, jnp.float32)
    for name, array in inputs._asdict().items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {array.dtype}, expected a floating dtype")
    return batch, tokens


def check_heads(op: str, heads: int, **weights: jax.Array) -> None:
    """Weights of one float32 number a head."""
    for name, weight in weights.items():
        check_shape(op, name, weight, (heads,))
        check_dtype(op, name, weight, jnp.float32)


def check_ring(op: str, state: jax.Array, ring: Ring) -> None:
    """The ring against the pool."""
    L, S, H, P, N = state.shape
    if not isinstance(ring.inputs, dict) or set(ring.inputs) != {"x", "dt", "B"}:
        raise ValueError(f"{op}: ring.inputs is {jax.tree.structure(ring.inputs)}, expected a dict of x, dt and B")
    x, dt, B = ring.inputs["x"], ring.inputs["dt"], ring.inputs["B"]
    check_shape(op, "ring.order", ring.order, (S, "Q"))
    check_shape(op, "ring.inputs['x']", x, (L, S, ring.length, H, P))
    check_shape(op, "ring.inputs['dt']", dt, (L, S, ring.length, H))
    check_shape(op, "ring.inputs['B']", B, (L, S, ring.length, "G", N))
    check_dtype(op, "ring.inputs['dt']", dt, jnp.float32)
    check_row_values(op, S, **{"ring.starts": ring.starts, "ring.counts": ring.counts})
    check_dtype(op, "ring.order", ring.order, jnp.int32)


def check_kept(op: str, ring: Ring, inputs: SSMInputs) -> None:
    """What a pass writes into the ring: with other dtypes a replay would not have the bits of the pass."""
    T, Q = inputs.x.shape[1], ring.length
    if 2 * T > Q:
        raise ValueError(f"{op}: the ring holds Q = {Q} inputs, expected 2 T = {2 * T} or more for T = {T} tokens")
    for name in ("x", "B"):
        kept, given = ring.inputs[name], getattr(inputs, name)
        check_shape(op, f"ring.inputs[{name!r}]", kept, (*kept.shape[:3], *given.shape[2:]))
        check_dtype(op, f"ring.inputs[{name!r}]", kept, given.dtype)


def check_row_values(op: str, batch: int, dtype: Any = jnp.int32, **rows: jax.Array) -> None:
    """Arrays `[B]`."""
    for name, row in rows.items():
        check_shape(op, name, row, (batch,))
        check_dtype(op, name, row, dtype)


def check_dtype(op: str, name: str, array: jax.Array, expected: Any) -> None:
    """Raises unless the dtype is the expected one."""
    if array.dtype != expected:
        raise ValueError(f"{op}: {name} is {array.dtype}, expected {jnp.dtype(expected)}; cast it with .astype")
