"""Concrete arguments of the two ops, calls that update their pools in place, and a copy to compare them with."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import state_commit, state_scatter
from pallas_kernels.state_commit import shapes as commit_shapes
from pallas_kernels.state_commit.shapes import CommitShape
from pallas_kernels.state_scatter import shapes as scatter_shapes

OPS: dict[str, tuple[Callable, Any, tuple[str, ...]]] = {
    "state_commit": (state_commit, commit_shapes, ("ssm", "conv")),
    "state_scatter": (state_scatter, scatter_shapes, ("dst",)),
}


def arguments(
    op: str, shape: CommitShape, slots: int, batch: int, steps: int, *, tracked: bool = False, tree: bool = False
) -> dict[str, Any]:
    """Keyword arguments with arbitrary bits in every array and indices that are all in range and distinct.

    Args:
        op: a name in OPS.
        shape: layers, states and windows.
        slots, batch, steps: S, B, T; tracked sets need 2 B <= S.
        tracked: with a second index set.
        tree: with parents, each node's being the one before the last; state_commit only.
    """
    options = {"tree": tree} if op == "state_commit" else {}
    shapes = OPS[op][1].arguments(shape, slots, batch, steps, tracked=tracked, **options)
    given = {name: jax.tree.map(_arbitrary, value) for name, value in shapes.items()}
    order = jax.random.permutation(jax.random.key(0), slots).astype(jnp.int32)
    node = jnp.arange(steps, dtype=jnp.int32)
    given["slots"] = order[:batch]
    given["steps"] = jnp.arange(batch, dtype=jnp.int32) % steps
    if tracked:
        given |= {"track_slots": order[batch : 2 * batch], "track_steps": (given["steps"] + 1) % steps}
    if tree:
        given["parents"] = jnp.broadcast_to(jnp.where(node > 1, node - 2, node - 1), (batch, steps))
    return given


def in_place(op: str, **static: Any) -> Callable[[dict[str, Any]], Any]:
    """The op under jit with its pools donated: takes all arguments as one dictionary and returns the new pools."""
    function, _, names = OPS[op]

    def call(pools: Mapping[str, Any], others: Mapping[str, Any]):
        return function(**pools, **others, **static)

    compiled = jax.jit(call, donate_argnums=0)

    def run(given: dict[str, Any]):
        return compiled({name: given[name] for name in names}, {k: v for k, v in given.items() if k not in names})

    return run


def advancing(op: str, given: dict[str, Any], calls: int, **static: Any) -> Callable[[], Any]:
    """A function that runs the op `calls` times, each on the pools that the last one left; consumes `given`."""
    run, names = in_place(op, **static), OPS[op][2]

    def advance():
        for _ in range(calls):
            written = run(given)
            given.update(zip(names, written if len(names) > 1 else (written,), strict=True))
        return [given[name] for name in names]

    return advance


def copying(size: int, calls: int) -> Callable[[], Any]:
    """A function that copies `size` bytes `calls` times, into a buffer that exists."""
    source, target = jnp.ones((size // 4,), jnp.float32), jnp.zeros((size // 4 + 1,), jnp.float32)
    copy = jax.jit(lambda into, source, at: jax.lax.dynamic_update_slice(into, source, (at,)), donate_argnums=0)

    def run():
        nonlocal target
        for n in range(calls):
            target = copy(target, source, n % 2)
        return target

    return run


def moved_bytes(op: str, shape: CommitShape, batch: int, *, tracked: bool = False) -> int:
    """Bytes that one call writes: states and windows of the batch, of both index sets."""
    entries = 2 * batch if tracked else batch
    return total_bytes(OPS[op][1].arguments(shape, entries, batch, 1, tracked=False), OPS[op][2])


def total_bytes(shapes: Mapping[str, Any], names: tuple[str, ...] | None = None) -> int:
    leaves = jax.tree.leaves([value for name, value in shapes.items() if names is None or name in names])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@jax.jit
def same_bits(left: Any, right: Any) -> jax.Array:
    """Whether two pytrees of arrays hold the same bits, NaNs included."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return jnp.stack([jnp.all(_bits(a) == _bits(b)) for a, b in pairs]).all()


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def _arbitrary(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of `leaf`'s shape that differs from place to place, made without a temporary of its size."""
    return _hashed(leaf.shape, leaf.dtype)


def _hashed(shape, dtype):
    def make():
        if not jnp.issubdtype(dtype, jnp.floating):
            return jnp.zeros(shape, dtype)
        place = jnp.zeros(shape, jnp.uint32)
        for axis in range(len(shape)):
            place = place * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place ^ (place >> 13)
        # Half-open [0, 1) floats rather than raw bits: an XLA that widens 16-bit floats to move them keeps these.
        return ((place >> 8).astype(jnp.float32) / 2**24).astype(dtype)

    return jax.jit(make)()
