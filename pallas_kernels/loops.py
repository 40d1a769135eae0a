"""jax's loops, for code that may run under `jax.shard_map` with its default `check_vma=True`.

There a value's type says over which mesh axes it varies, and a loop's carry must have one type throughout. A carry that
starts as a constant, or as a cache that is the same everywhere, often varies once the body has run. The loops here mark
the initial carry as varying wherever the body makes it vary. Elsewhere they are jax's own, traced once.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def scan(body: Callable, init: Any, xs: Any = None, *, length: int | None = None, unroll: bool = False) -> Any:
    """`jax.lax.scan`."""

    def step(carry):
        return body(carry, jax.tree.map(lambda x: lax.index_in_dim(x, 0, keepdims=False), xs))[0]

    return lax.scan(body, varying_as_after(step, init), xs, length=length, unroll=unroll)


def fori_loop(lower: Any, upper: Any, body: Callable, init: Any) -> Any:
    """`jax.lax.fori_loop`."""
    return lax.fori_loop(lower, upper, body, varying_as_after(lambda carry: body(lower, carry), init))


def while_loop(condition: Callable, body: Callable, init: Any) -> Any:
    """`jax.lax.while_loop`."""
    return lax.while_loop(condition, body, varying_as_after(body, init))


def varying_as_after(step: Callable, carry: Any) -> Any:
    """The carry, varying over every mesh axis over which some number of `step`s makes it vary."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    while True:
        wider = jax.tree.map(_varying_as, carry, jax.eval_shape(step, carry))
        if _axes(wider) == _axes(carry):
            return carry
        carry = wider


def varying_axes(*arrays: Any) -> frozenset:
    """The manual mesh axes over which any of the arrays, or of the shapes that `jax.eval_shape` gives, varies."""
    return frozenset().union(*(_varying(array) for array in arrays))


def _varying_as(value: Any, after: Any) -> Any:
    missing = tuple(sorted(_varying(after) - _varying(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def _varying(value: Any) -> frozenset:
    kind = value.manual_axis_type if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value).manual_axis_type
    return kind.varying


def _axes(tree: Any) -> list[frozenset]:
    return [_varying(leaf) for leaf in jax.tree.leaves(tree)]
