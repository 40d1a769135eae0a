"""What the arguments of this op and of `gated_delta_chunk` must be while tracing."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_shape
from pallas_kernels.gated_delta_update.recurrence import Tokens
from pallas_kernels.gated_delta_update.reference import Call
from pallas_kernels.ring import Ring

_STATE_DTYPES = ("float32", "bfloat16", "float16")


def check_rows(op: str, state: Any, tokens: Tokens, slots: Any, num_tokens: Any, layer: int) -> None:
    """Checks what every mode takes; shapes as `gated_delta_update`'s docstring has them."""
    check_shape(op, "state", state, ("L", "S", "Hv", "V", "K"))
    L, _, Hv, V, K = state.shape
    if state.dtype.name not in _STATE_DTYPES:
        raise ValueError(f"{op}: state is {state.dtype}, expected one of {', '.join(_STATE_DTYPES)}")
    if not isinstance(layer, int) or not 0 <= layer < L:
        raise ValueError(f"{op}: layer is {layer!r}, expected a static int in 0..{L - 1}")
    check_shape(op, "k", tokens.k, ("B", "T", "Hk", K))
    B, T, Hk, _ = tokens.k.shape
    if T == 0 or Hk == 0 or Hv % Hk:
        raise ValueError(
            f"{op}: k has T = {T} tokens and Hk = {Hk} heads, expected a token at least and heads that divide Hv = {Hv}"
        )
    check_shape(op, "q", tokens.q, (B, T, Hk, K))
    check_shape(op, "v", tokens.v, (B, T, Hv, V))
    check_shape(op, "g", tokens.g, (B, T, Hv, K) if tokens.g.ndim == 4 else (B, T, Hv))
    check_shape(op, "beta", tokens.beta, (B, T, Hv))
    for name in ("g", "beta"):
        _check_dtype(op, name, getattr(tokens, name), "float32", "gates() returns it so; 16 bits make output drift")
    for name, rows in (("slots", slots), ("num_tokens", num_tokens)):
        check_shape(op, name, rows, (B,))
        _check_dtype(op, name, rows, "int32", "cast it with .astype(jnp.int32)")


def check_mode(op: str, call: Call, disable_state_update: bool) -> None:
    """Checks that what was passed is one of the op's modes, and fits."""
    L, S, *state = call.state.shape
    B, T = call.tokens.k.shape[:2]
    if call.ring is not None and call.snapshots is not None:
        raise ValueError(f"{op}: got snapshots and ring, expected one: both keep what a later commit needs")
    if call.ring is not None and disable_state_update:
        raise ValueError(f"{op}: disable_state_update=True, but ring folds rows into state; pass fold=False for none")
    if (call.ring is None) != (call.fold is None):
        absent = "fold" if call.fold is None else "ring"
        raise ValueError(f"{op}: {absent} is None, but ring and fold only mean something together; pass both")
    if call.advance and (call.chunked or call.parents is not None):
        raise ValueError(
            f"{op}: state would advance over {'a tree' if call.parents is not None else 'a chunked window'}; pass "
            "snapshots, ring or disable_state_update=True, or take gated_delta_chunk for a prefill"
        )
    if call.parents is not None:
        check_shape(op, "parents", call.parents, (B, T))
        _check_dtype(op, "parents", call.parents, "int32", "cast it with .astype(jnp.int32)")
    if call.snapshots is not None:
        check_shape(op, "snapshots", call.snapshots, (L, B, T, *state))
        _check_dtype(op, "snapshots", call.snapshots, call.state.dtype, "it holds states as the pool does")
    if call.ring is not None:
        check_shape(op, "fold", call.fold, (B,))
        _check_dtype(op, "fold", call.fold, "bool", "must_fold() returns it so")
        _check_ring(op, call.ring, L, S, T, call.tokens)


def _check_ring(op: str, ring: Ring, L: int, S: int, T: int, tokens: Tokens) -> None:
    kept = {name: leaf for name, leaf in tokens._asdict().items() if name != "q"}
    if not isinstance(ring.inputs, dict) or set(ring.inputs) != set(kept):
        raise ValueError(f"{op}: ring.inputs is {jax.tree.structure(ring.inputs)}, expected a dict of {sorted(kept)}")
    for name, leaf in kept.items():
        where = f"ring.inputs[{name!r}]"
        check_shape(op, where, ring.inputs[name], (L, S, "Q", *leaf.shape[2:]))
        check_shape(op, where, ring.inputs[name], (L, S, ring.length, *leaf.shape[2:]))
        _check_dtype(op, where, ring.inputs[name], leaf.dtype, f"a history has the bits of {name} as it came")
    if ring.length < 2 * T:
        raise ValueError(f"{op}: the ring holds Q = {ring.length} tokens, expected 2 T = {2 * T} at least")
    for name in ("starts", "counts"):
        check_shape(op, f"ring.{name}", getattr(ring, name), (S,))
        _check_dtype(op, f"ring.{name}", getattr(ring, name), "int32", "cast it with .astype(jnp.int32)")


def _check_dtype(op: str, name: str, array: Any, expected: Any, why: str) -> None:
    if array.dtype != jnp.dtype(expected):
        raise ValueError(f"{op}: {name} is {array.dtype}, expected {jnp.dtype(expected)}: {why}")
