"""What the arguments of every recurrence must be while tracing, and what a pass returns.

L layers, S slots, B rows, T tokens of a row, H heads, P and N the sides of a state, Q ring length.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_dtype, check_layer, check_parents, check_rows, check_shape
from pallas_kernels.ring import Ring
from pallas_kernels.tree import earlier_parents

Form = Literal["step", "chunk"]

_STATE_DTYPES = ("float32", "bfloat16", "float16")


class StateUpdate(NamedTuple):
    """What a pass returns; a buffer that was not given is None, and one that the pass does not write is as it was.

    Attributes:
        y: `[B, T, ...]` outputs.
        state: `[L, S, H, P, N]`.
        snapshots: `[L, B, T, H, P, N]`.
        ring: with the pass's inputs after each row's history; starts, counts and order do not change.
    """

    y: jax.Array
    state: jax.Array
    snapshots: jax.Array | None = None
    ring: Ring | None = None


class Layout(NamedTuple):
    """What a recurrence reads of one token, for the checks; a letter is any size, the same wherever it is named.

    Attributes:
        shapes: of each input of one token, by name; the first name sets B and T.
        float32: names of the inputs that are float32; the others have any floating dtype.
        kept: names of the inputs that a ring keeps.
        groups: a letter whose size divides the number of heads, if any.
    """

    shapes: dict[str, tuple[int | str, ...]]
    float32: tuple[str, ...]
    kept: tuple[str, ...]
    groups: str | None = None


class Pass(NamedTuple):
    """One pass's arguments, checked.

    Attributes:
        state: `[L, S, H, P, N]`, the pool.
        inputs: the recurrence's, `[B, T, ...]`.
        slots: `[B]`.
        num_tokens: `[B]`, or None where the inputs themselves say which tokens change nothing.
        layer: which layer of every buffer.
        writes_state: whether the state after the tokens goes to the pool.
        snapshots, ring, fold, parents: as given; parents -1 where one is no earlier node.
        form: "step" or "chunk".
    """

    state: jax.Array
    inputs: Any
    slots: jax.Array
    num_tokens: jax.Array | None
    layer: int
    writes_state: bool
    snapshots: jax.Array | None
    ring: Ring | None
    fold: jax.Array | None
    parents: jax.Array | None
    form: Form


class Fold(NamedTuple):
    """`fold_history`'s arguments, checked.

    Attributes:
        num_tokens: None is the ring's counts.
        inputs_type: the recurrence's NamedTuple of inputs.
        state, ring, slots, to_slots, layer, form: as given.
    """

    state: jax.Array
    ring: Ring
    slots: jax.Array
    to_slots: jax.Array
    num_tokens: jax.Array | None
    layer: int | jax.Array
    form: Form
    inputs_type: type


def checked_pass(
    op: str,
    layout: Layout,
    state: jax.Array,
    inputs: Any,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array | None,
    snapshots: jax.Array | None,
    ring: Ring | None,
    fold: jax.Array | None,
    disable_state_update: bool,
    parents: jax.Array | None,
    form: Form,
) -> Pass:
    """The arguments of a pass; ValueError for what does not fit. `state` has been checked by `check_state`."""
    check_layer(op, layer, state.shape[0])
    check_form(op, form)
    B, T = check_inputs(op, layout, state, inputs)
    check_rows(op, B, slots=slots)
    if num_tokens is not None:
        check_rows(op, B, num_tokens=num_tokens)
    kept = {"snapshots": snapshots is not None, "ring": ring is not None, "disable_state_update": disable_state_update}
    if sum(kept.values()) > 1:
        named = " and ".join(name for name, given in kept.items() if given)
        raise ValueError(f"{op}: {named} are given; expected one of them at most, as they exclude each other")
    if (ring is None) != (fold is None):
        raise ValueError(f"{op}: {'ring' if ring is None else 'fold'} is None; pass ring and fold together")
    if parents is not None:
        parents = earlier_parents(check_parents(op, parents, B, T))
        if not any(kept.values()):
            raise ValueError(
                f"{op}: a tree has no last state to write; pass snapshots, ring or disable_state_update with parents"
            )
    if snapshots is not None:
        check_shape(op, "snapshots", snapshots, (state.shape[0], B, T, *state.shape[2:]))
        check_dtype(op, "snapshots", snapshots, state.dtype)
    if ring is not None:
        check_rows(op, B, jnp.bool_, fold=fold)
        check_ring(op, layout, state, ring)
        if ring.length < 2 * T:
            raise ValueError(f"{op}: the ring holds Q = {ring.length} inputs, expected 2 T = {2 * T} or more")
        for name, leaf in ring.inputs.items():
            given = getattr(inputs, name)
            check_shape(op, f"ring.inputs[{name!r}]", leaf, (*leaf.shape[:3], *given.shape[2:]))
            if leaf.dtype != given.dtype:
                raise ValueError(
                    f"{op}: ring.inputs[{name!r}] is {leaf.dtype}, expected {given.dtype}: a history has {name}'s bits"
                )
    writes = not any(kept.values())
    return Pass(state, inputs, slots, num_tokens, layer, writes, snapshots, ring, fold, parents, form)


def checked_fold(
    op: str,
    layout: Layout,
    state: jax.Array,
    ring: Ring,
    inputs_type: type,
    *,
    layer: int | jax.Array,
    slots: jax.Array,
    num_tokens: jax.Array | None,
    to_slots: jax.Array | None,
    form: Form,
) -> Fold:
    """The arguments of a fold; ValueError for what does not fit. `state` has been checked by `check_state`."""
    check_layer(op, layer, state.shape[0])
    check_form(op, form)
    check_ring(op, layout, state, ring)
    check_rows(op, slots.size, slots=slots)
    to_slots = slots if to_slots is None else to_slots
    check_rows(op, slots.size, to_slots=to_slots)
    if num_tokens is not None:
        check_rows(op, slots.size, num_tokens=num_tokens)
    return Fold(state, ring, slots, to_slots, num_tokens, layer, form, inputs_type)


def check_state(op: str, state: jax.Array, letters: tuple[int | str, ...]) -> None:
    """The pool `[L, S, H, P, N]`, by the recurrence's letters."""
    check_shape(op, "state", state, letters)
    if state.dtype.name not in _STATE_DTYPES:
        raise ValueError(f"{op}: state is {state.dtype}, expected one of {', '.join(_STATE_DTYPES)}")


def check_form(op: str, form: Any) -> None:
    """Refuses a form that does not exist."""
    if form not in get_args(Form):
        raise ValueError(f"{op}: form is {form!r}, expected 'step' or 'chunk'")


def check_inputs(op: str, layout: Layout, state: jax.Array, inputs: Any) -> tuple[int, int]:
    """A window's inputs against the pool; returns (B, T)."""
    arrays = {name: getattr(inputs, name) for name in layout.shapes}
    sizes = _check_arrays(op, layout, state, arrays, ("B", "T"), "{}")
    return sizes["B"], sizes["T"]


def check_ring(op: str, layout: Layout, state: jax.Array, ring: Ring) -> None:
    """The ring against the pool."""
    L, S = state.shape[:2]
    if not isinstance(ring.inputs, dict) or set(ring.inputs) != set(layout.kept):
        expected = ", ".join(layout.kept)
        raise ValueError(f"{op}: ring.inputs is {jax.tree.structure(ring.inputs)}, expected a dict of {expected}")
    check_shape(op, "ring.order", ring.order, (S, "Q"))
    check_dtype(op, "ring.order", ring.order, jnp.int32)
    arrays = {name: ring.inputs[name] for name in layout.kept}
    _check_arrays(op, layout, state, arrays, (L, S, ring.length), "ring.inputs[{!r}]")
    check_rows(op, S, **{"ring.starts": ring.starts, "ring.counts": ring.counts})


def _check_arrays(op, layout, state, arrays, leading, title) -> dict[str, int]:
    """Shapes and dtypes of arrays `[*leading, *x]` of tokens; returns the sizes of the letters."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        expected = (*leading, *layout.shapes[name])
        check_shape(op, title.format(name), array, tuple(sizes.get(letter, letter) for letter in expected))
        sizes |= {letter: size for letter, size in zip(expected, array.shape, strict=True) if isinstance(letter, str)}
        groups, heads = sizes.get(layout.groups), state.shape[2]
        if groups is not None and (groups == 0 or heads % groups):
            raise ValueError(
                f"{op}: {title.format(name)} has {layout.groups} = {groups}, expected a divisor of the {heads} heads"
            )
        if name in layout.float32:
            check_dtype(op, title.format(name), array, jnp.float32)
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{op}: {title.format(name)} is {array.dtype}, expected a floating dtype")
    return sizes
