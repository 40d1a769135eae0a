"""What the ops' arguments must be while tracing: structure, shapes and dtypes. For values see `validation.py`.

L layers, S slots, R source rows, T steps, B entries; every leaf of one call shares L, S, R and T.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Indices(NamedTuple):
    """Which state goes where, all `[B]` int32; rows None is 0..B-1, the track pair None is no second set."""

    slots: jax.Array
    steps: jax.Array
    rows: jax.Array | None
    track_slots: jax.Array | None
    track_steps: jax.Array | None


class Leaf(NamedTuple):
    """One array of the pool and what is written to it: path, `dst [L, S, ...]`, `src [L, R, T, ...]`."""

    path: str
    dst: jax.Array
    src: jax.Array


class Extent(NamedTuple):
    """L, S, R and T of one call."""

    layers: int
    slots: int
    rows: int
    steps: int


def pair_leaves(op: str, dst_name: str, dst: Any, src_name: str, src: Any) -> tuple[list[Leaf], Any]:
    """Pairs two trees' leaves; returns them and the tree that `dst`'s leaves go back into."""
    treedef: Any
    dst_paths, treedef = jax.tree_util.tree_flatten_with_path(dst)
    src_leaves, src_treedef = jax.tree_util.tree_flatten(src)
    if treedef != src_treedef:
        raise ValueError(f"{op}: {src_name} is {src_treedef}, expected the structure of {dst_name}, {treedef}")
    leaves = []
    for (path, dst_leaf), src_leaf in zip(dst_paths, src_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        leaf = Leaf(where, jnp.asarray(dst_leaf), jnp.asarray(src_leaf))
        if leaf.dst.dtype != leaf.src.dtype:
            raise ValueError(
                f"{op}: {src_name}{where} is {leaf.src.dtype}, expected {leaf.dst.dtype} as {dst_name}{where}"
            )
        leaves.append(leaf)
    return leaves, treedef


def check_leaves(
    op: str, dst_name: str, src_name: str, leaves: list[Leaf], extent: Extent | None, *, windows: bool = False
) -> Extent | None:
    """Checks every leaf against the one L, S, R and T of the call, which the first leaf sets if `extent` is None.

    windows: dst is `[L, S, W-1, C]` against src `[L, R, T, C]`, else `[L, S, *x]` against `[L, R, T, *x]`.
    """
    for leaf in leaves:
        dst_at, src_at = dst_name + leaf.path, src_name + leaf.path
        if windows:
            check_shape(op, dst_at, leaf.dst, ("L", "S", "W-1", "C"))
        elif leaf.dst.ndim < 2:
            raise ValueError(f"{op}: {dst_at} has shape {list(leaf.dst.shape)}, expected [L, S, ...]")
        if leaf.src.ndim < 3:
            raise ValueError(f"{op}: {src_at} has shape {list(leaf.src.shape)}, expected [L, R, T, ...]")
        if extent is None:
            extent = Extent(*leaf.dst.shape[:2], *leaf.src.shape[1:3])
        check_shape(op, dst_at, leaf.dst, (extent.layers, extent.slots, *leaf.dst.shape[2:]))
        state = leaf.dst.shape[3:] if windows else leaf.dst.shape[2:]
        check_shape(op, src_at, leaf.src, (extent.layers, extent.rows, extent.steps, *state))
    return extent


def check_shape(op: str, name: str, array: jax.Array, expected: tuple[int | str, ...]) -> None:
    """Raises unless the shape matches; letters in `expected` match any size and appear in the message."""
    fits = len(array.shape) == len(expected) and all(
        isinstance(want, str) or want == size for size, want in zip(array.shape, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(map(str, expected))
        raise ValueError(f"{op}: {name} has shape {list(array.shape)}, expected [{wanted}]")


def check_indices(
    op: str, extent: Extent, slots: Any, steps: Any, rows: Any, track_slots: Any, track_steps: Any
) -> Indices:
    """The index arrays, checked."""
    if (track_slots is None) != (track_steps is None):
        absent = "track_steps" if track_steps is None else "track_slots"
        raise ValueError(
            f"{op}: {absent} is None, but track_slots and track_steps only mean something together; pass both"
        )
    slots = as_int32(op, "slots", slots)
    check_shape(op, "slots", slots, ("B",))
    batch = slots.shape[0]
    others = {"steps": steps}
    if rows is None:
        if batch > extent.rows:
            raise ValueError(
                f"{op}: slots has B = {batch} entries but the source only R = {extent.rows} rows; pass rows to say "
                "which row each entry reads"
            )
    else:
        others["rows"] = rows
    if track_slots is not None:
        others |= {"track_slots": track_slots, "track_steps": track_steps}
    arrays = {name: as_int32(op, name, value) for name, value in others.items()}
    for name, array in arrays.items():
        check_shape(op, name, array, (batch,))
    return Indices(slots, arrays["steps"], arrays.get("rows"), arrays.get("track_slots"), arrays.get("track_steps"))


def check_parents(op: str, parents: Any, batch: int, steps: int) -> jax.Array:
    """The verify trees' parents `[B, T]`, checked."""
    parents = as_int32(op, "parents", parents)
    check_shape(op, "parents", parents, (batch, steps))
    return parents


def as_int32(op: str, name: str, value: Any) -> jax.Array:
    """The value as an array, which must be int32."""
    array = jnp.asarray(value)
    if array.size == 0 and not isinstance(value, jax.Array | np.ndarray):
        array = array.astype(jnp.int32)  # an empty list has no dtype
    if array.dtype != jnp.int32:
        raise ValueError(f"{op}: {name} is {array.dtype}, expected int32; cast it with .astype(jnp.int32)")
    return array


def check_layer(op: str, layer: Any, layers: int) -> None:
    """The layer is an index into a pool; where it is known while tracing, it is in range."""
    if isinstance(layer, jax.Array) and layer.shape == () and layer.dtype == jnp.int32:
        return
    if not isinstance(layer, int) or not 0 <= layer < layers:
        raise ValueError(f"{op}: layer is {layer!r}, expected an integer in 0..{layers - 1}")


def check_rows(op: str, batch: int, dtype: Any = jnp.int32, **rows: Any) -> None:
    """Arrays `[B]`."""
    for name, row in rows.items():
        check_shape(op, name, row, (batch,))
        check_dtype(op, name, row, dtype)


def check_dtype(op: str, name: str, array: jax.Array, expected: Any) -> None:
    """Raises unless the dtype is the expected one."""
    if array.dtype != expected:
        raise ValueError(f"{op}: {name} is {array.dtype}, expected {jnp.dtype(expected)}; cast it with .astype")
