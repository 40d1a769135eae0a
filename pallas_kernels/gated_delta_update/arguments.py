"""What the arguments of this op and of `gated_delta_chunk` must be while tracing, and what it returns.

L layers, S slots, B rows, T tokens of a row, Hk key heads, Hv value heads, V and K sizes of a value and a key, Q ring
length.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_shape
from pallas_kernels.gated_delta_update.recurrence import Tokens
from pallas_kernels.ring import Ring

Form = Literal["step", "chunk"]

_STATE_DTYPES = ("float32", "bfloat16", "float16")


class DeltaUpdate(NamedTuple):
    """What a pass returns; a buffer that was not given is None, and one that the pass does not write is as it was.

    Attributes:
        o: `[B, T, Hv, V]` outputs in v's dtype; 0 for tokens past `num_tokens` and rows without a slot.
        state: `[L, S, Hv, V, K]`.
        snapshots: `[L, B, T, Hv, V, K]`.
        ring: with the pass's inputs after each row's history; starts, counts and order do not change.
    """

    o: jax.Array
    state: jax.Array
    snapshots: jax.Array | None = None
    ring: Ring | None = None


class Call(NamedTuple):
    """`gated_delta_update`'s arguments, checked; advance: whether the state after the tokens goes to the pool."""

    state: jax.Array
    tokens: Tokens
    slots: jax.Array
    num_tokens: jax.Array
    layer: int
    scale: float
    advance: bool
    snapshots: jax.Array | None
    ring: Ring | None
    fold: Any
    parents: jax.Array | None
    form: Form


class Fold(NamedTuple):
    """`fold_history`'s arguments, checked."""

    state: jax.Array
    ring: Ring
    slots: jax.Array
    to_slots: jax.Array
    num_tokens: jax.Array
    layer: int
    form: Form


def check_state(op: str, state: jax.Array, layer: Any) -> None:
    """The pool, and a static index into it."""
    check_shape(op, "state", state, ("L", "S", "Hv", "V", "K"))
    if state.dtype.name not in _STATE_DTYPES:
        raise ValueError(f"{op}: state is {state.dtype}, expected one of {', '.join(_STATE_DTYPES)}")
    if not isinstance(layer, int) or not 0 <= layer < state.shape[0]:
        raise ValueError(f"{op}: layer is {layer!r}, expected an int in 0..{state.shape[0] - 1}, known while tracing")


def check_tokens(op: str, state: jax.Array, tokens: Tokens) -> tuple[int, int]:
    """A window's inputs against the pool; returns (B, T)."""
    _, _, Hv, V, K = state.shape
    check_shape(op, "k", tokens.k, ("B", "T", "Hk", K))
    B, T, Hk, _ = tokens.k.shape
    if Hk == 0 or Hv % Hk:
        raise ValueError(f"{op}: k has Hk = {Hk} heads, expected a divisor of Hv = {Hv}")
    check_shape(op, "q", tokens.q, (B, T, Hk, K))
    check_shape(op, "v", tokens.v, (B, T, Hv, V))
    check_shape(op, "g", tokens.g, (B, T, Hv, K) if tokens.g.ndim == 4 else (B, T, Hv))
    check_shape(op, "beta", tokens.beta, (B, T, Hv))
    for name in ("k", "q", "v"):
        if not jnp.issubdtype(getattr(tokens, name).dtype, jnp.floating):
            raise ValueError(f"{op}: {name} is {getattr(tokens, name).dtype}, expected a floating dtype")
    for name in ("g", "beta"):
        _check_dtype(op, name, getattr(tokens, name), "float32", "as gates() returns it; 16 bits make output drift")
    return B, T


def check_form(op: str, form: Any) -> None:
    """Refuses a form that does not exist."""
    if form not in get_args(Form):
        raise ValueError(f"{op}: form is {form!r}, expected 'step' or 'chunk'")


def check_rows(op: str, batch: int, dtype: Any = "int32", **rows: jax.Array) -> None:
    """Arrays `[B]`."""
    for name, row in rows.items():
        check_shape(op, name, row, (batch,))
        _check_dtype(op, name, row, dtype, "cast it with .astype")


def check_kept(op: str, call: Call, disable_state_update: bool) -> None:
    """A pass writes one of state, snapshots and ring, and its shape fits."""
    L, S, *state = call.state.shape
    B, T = call.tokens.k.shape[:2]
    kept = {
        "snapshots": call.snapshots is not None,
        "ring": call.ring is not None,
        "disable_state_update": disable_state_update,
    }
    if sum(kept.values()) > 1:
        named = " and ".join(name for name, given in kept.items() if given)
        raise ValueError(f"{op}: {named} are given; expected one of them at most, as they exclude each other")
    if (call.ring is None) != (call.fold is None):
        raise ValueError(f"{op}: {'ring' if call.ring is None else 'fold'} is None; pass ring and fold together")
    if call.advance and call.parents is not None:
        raise ValueError(
            f"{op}: a tree has no last state to write; pass snapshots, ring or disable_state_update with parents"
        )
    if call.snapshots is not None:
        check_shape(op, "snapshots", call.snapshots, (L, B, T, *state))
        _check_dtype(op, "snapshots", call.snapshots, call.state.dtype, "it holds states as the pool does")
    if call.ring is not None:
        check_rows(op, B, "bool", fold=call.fold)
        check_ring(op, call.state, call.ring)
        if call.ring.length < 2 * T:
            raise ValueError(f"{op}: the ring holds Q = {call.ring.length} tokens, expected 2 T = {2 * T} at least")
        for name, leaf in call.ring.inputs.items():
            given = getattr(call.tokens, name)
            check_shape(op, f"ring.inputs[{name!r}]", leaf, (L, S, call.ring.length, *given.shape[2:]))
            _check_dtype(op, f"ring.inputs[{name!r}]", leaf, given.dtype, f"a history has the bits of {name}")


def check_ring(op: str, state: jax.Array, ring: Ring) -> None:
    """The ring against the pool."""
    L, S, Hv, V, K = state.shape
    if not isinstance(ring.inputs, dict) or set(ring.inputs) != {"k", "v", "g", "beta"}:
        raise ValueError(f"{op}: ring.inputs is {jax.tree.structure(ring.inputs)}, expected a dict of k, v, g, beta")
    check_shape(op, "ring.order", ring.order, (S, "Q"))
    _check_dtype(op, "ring.order", ring.order, "int32", "cast it with .astype")
    entries, g = (L, S, ring.length), ring.inputs["g"]
    expected: dict[str, tuple] = {
        "k": (*entries, "Hk", K),
        "v": (*entries, Hv, V),
        "g": (*entries, Hv, K) if g.ndim == 5 else (*entries, Hv),
        "beta": (*entries, Hv),
    }
    for name, shape in expected.items():
        check_shape(op, f"ring.inputs[{name!r}]", ring.inputs[name], shape)
    check_rows(op, S, **{"ring.starts": ring.starts, "ring.counts": ring.counts})


def _check_dtype(op: str, name: str, array: Any, expected: Any, why: str) -> None:
    if array.dtype != jnp.dtype(expected):
        raise ValueError(f"{op}: {name} is {array.dtype}, expected {jnp.dtype(expected)}: {why}")
