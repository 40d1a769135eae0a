"""The two ops by their definition, in NumPy, entry by entry; and random arguments to try them on."""

from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "int8": np.int8}
FLOAT8 = tuple(
    f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
)
# What a pool may hold: every dtype of whole bytes that a 32-bit jax has.
ALL_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, None) or name)
    for name in ("float32", "float16", "bfloat16", *FLOAT8, "int32", "uint16", "int8", "bool", "complex64")
}


class Sets(NamedTuple):
    """Index arrays of one call, as `state_scatter` and `state_commit` take them."""

    slots: np.ndarray
    steps: np.ndarray
    rows: np.ndarray
    track_slots: np.ndarray | None = None
    track_steps: np.ndarray | None = None


def scatter(dst, src, sets):
    """state_scatter of one leaf: `dst [L, S, *x]`, `src [L, R, T, *x]`."""
    dst = dst.copy()
    for i in range(len(sets.slots)):
        for slots, steps in ((sets.slots, sets.steps), (sets.track_slots, sets.track_steps)):
            if slots is not None and _inside(dst, src, slots[i], steps[i], sets.rows[i]):
                dst[:, slots[i]] = src[:, sets.rows[i], steps[i]]
    return dst


def commit(ssm, conv, states, inputs, sets, parents=None):
    """state_commit of one SSM leaf and one conv leaf."""
    has_slot = (sets.slots >= 0) & (sets.slots < conv.shape[1])
    if sets.track_slots is not None:
        sets = sets._replace(track_slots=np.where(has_slot, sets.track_slots, -1))
    new = conv.copy()
    for i in range(len(sets.slots)):
        for slots, steps in ((sets.slots, sets.steps), (sets.track_slots, sets.track_steps)):
            if slots is not None and _inside(conv, inputs, slots[i], steps[i], sets.rows[i]) and has_slot[i]:
                path = _path(steps[i], None if parents is None else parents[i])
                stream = np.concatenate([conv[:, sets.slots[i]], inputs[:, sets.rows[i]][:, path]], axis=1)
                new[:, slots[i]] = stream[:, stream.shape[1] - conv.shape[2] :]
    return scatter(ssm, states, sets), new


def random_bytes(rng, shape, dtype):
    """Random bits, NaNs of every kind among them: what lies in a pool and must stay as it is."""
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype).reshape(shape)


def random_values(rng, shape, dtype):
    """Random bits but one kind of NaN and no subnormals: 16-bit values that survive a detour through float32."""
    array = random_bytes(rng, shape, dtype)
    if dtype == np.int8:
        return array
    with np.errstate(invalid="ignore"):  # looking at a signalling NaN
        array = np.where(np.isnan(array), np.array(np.nan, dtype), array)
        return np.where(np.abs(array) < ml_dtypes.finfo(dtype).smallest_normal, np.array(0, dtype), array)


def bits(array):
    """An array's bytes as unsigned integers, so that NaNs compare."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def random_parents(rng, batch, nodes):
    """`[B, T]` int32: random trees, parents before children, -1 at the root (node 0)."""
    return np.array([[-1, *(rng.integers(0, t) for t in range(1, nodes))] for _ in range(batch)], np.int32).reshape(
        batch, nodes
    )


def _path(node, parents):
    path = [node]
    while path[0] > 0 if parents is None else parents[path[0]] >= 0:
        path.insert(0, path[0] - 1 if parents is None else parents[path[0]])
    return path


def _inside(dst, src, slot, step, row):
    return 0 <= slot < dst.shape[1] and 0 <= row < src.shape[1] and 0 <= step < src.shape[2]
