"""Arguments of the kernels at any size; whatever no row of a pass may read is NaN.

L layers, S slots, B rows, T tokens, Q ring length, M positions of a slot's keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ring import Ring

_POOLS = ("state", "conv_state")
_WRITTEN = ("snapshots", "conv_inputs")
_UNREAD = {"q", "k", "v", "g", "beta"}  # behind a row's tokens; x, B and C only have to be finite there, with dt = 0
_BETWEEN = {"dt": (0.02, 1.0), "g": (-1.0, -0.02), "beta": (0.05, 0.95), "A": (-2.0, -0.1)}  # the rest is normal


def draw(shapes: dict[str, Any], layer: int, *, padding: bool, seed: int = 0) -> dict[str, Any]:
    """Concrete arguments of a pass on one layer, from abstract ones as an op's `shapes.arguments` returns them.

    Args:
        shapes: of one of the three recurrent ops or of `decode_attention`.
        layer: the one of which the rows' states and histories are drawn.
        padding: whether rows lack a slot, lack tokens, or have fewer than T.
        seed: equal ones give equal arguments.

    Returns:
        the arguments and `num_tokens`, the tokens of each row, whether the op takes it or not.
    """
    rng = np.random.default_rng(seed)
    rows = _rows(rng, shapes, padding)
    slots, num_tokens = rows["slots"], rows["num_tokens"]
    real = np.arange(_tokens(shapes)) < num_tokens[:, None]
    given: dict[str, Any] = {}
    for name, shape in shapes.items():
        if name in rows or name == "fold":
            continue
        if name in _POOLS:
            values = _values(rng, name, (slots.size, *shape.shape[2:]))
            given[name] = _placed(shape.shape, shape.dtype, layer, _within(slots, shape.shape[1]), values)
        elif name in _WRITTEN:
            given[name] = jnp.full(shape.shape, jnp.nan, shape.dtype)
        elif name == "ring":
            given[name] = _ring(rng, shape, layer, slots, _tokens(shapes))
        elif name in ("keys", "values"):
            values = _values(rng, name, (slots.size, *shape.shape[1:]))
            values[np.arange(shape.shape[1]) >= (rows["lengths"] + num_tokens)[:, None]] = np.nan
            given[name] = _placed((1, *shape.shape), shape.dtype, 0, _within(slots, shape.shape[0]), values)[0]
        else:
            values = _values(rng, name, shape.shape)
            if name in _UNREAD:
                values[~real] = np.nan
            if name == "dt":
                values[~real] = 0
            given[name] = jnp.asarray(values, shape.dtype)
    if "fold" in shapes:
        rows["fold"] = rng.random(slots.size) < 0.5
    return given | {name: jnp.asarray(value) for name, value in rows.items()}


def fill(shapes: Any) -> Any:
    """Arrays of any size for a clock: numbers below 1 that differ from place to place, decays below 0, integers 0.

    A ring is without history.
    """

    def made(path, leaf):
        low, _ = _BETWEEN.get(getattr(path[-1], "key", ""), (0.0, 1.0))
        return _hashed(leaf.shape, leaf.dtype, -1 if low < 0 else 1)

    filled = jax.tree_util.tree_map_with_path(made, shapes)
    return filled | {"ring": Ring.empty(filled["ring"].inputs)} if "ring" in filled else filled


def _rows(rng: np.random.Generator, shapes: dict[str, Any], padding: bool) -> dict[str, np.ndarray]:
    """What is one value a row: slots, tokens, lengths and trees; of six rows three have a slot and a token."""
    (B,), T, S = shapes["slots"].shape, _tokens(shapes), _slots(shapes)
    rows = {"slots": rng.permutation(S)[:B].astype(np.int32), "num_tokens": np.full(B, T, np.int32)}
    if padding:
        rows["num_tokens"] = np.where(np.arange(B) % 6 == 3, rng.integers(1, T + 1, B), T).astype(np.int32)
        rows["num_tokens"][2::6] = 0
        rows["slots"][1::6] = -1
        rows["slots"][4::6] = S
    if "parents" in shapes:
        rows["parents"] = np.stack([rng.integers(-1, t, B) for t in range(T)], axis=1).astype(np.int32)
    if "lengths" in shapes:
        rows["lengths"] = rng.integers(0, shapes["keys"].shape[1] - T + 1, B).astype(np.int32)
    if "ancestors" in shapes:
        rows["ancestors"] = rng.random(shapes["ancestors"].shape) < 0.5
    return rows


def _ring(rng: np.random.Generator, shape: Ring, layer: int, slots: np.ndarray, tokens: int) -> Ring:
    """Histories in any order, of every length that leaves room for a pass: empty ones, and some around the end."""
    (S,), Q = shape.starts.shape, shape.length
    starts, counts = np.zeros(S, np.int32), np.zeros(S, np.int32)
    in_range = (slots >= 0) & (slots < S)
    start, count = (rng.integers(0, end, slots.size).astype(np.int32) for end in (Q, Q - tokens + 1))
    starts[slots[in_range]], counts[slots[in_range]] = start[in_range], count[in_range]
    order = rng.permuted(np.tile(np.arange(Q, dtype=np.int32), (S, 1)), axis=1)
    place = np.argsort(order[np.where(in_range, slots, 0)], axis=1)  # of each entry in its slot's order
    held = (place - start[:, None]) % Q < count[:, None]
    inputs = {}
    for name, leaf in shape.inputs.items():
        values = _values(rng, name, (slots.size, *leaf.shape[2:]))
        values[~held] = np.nan
        inputs[name] = _placed(leaf.shape, leaf.dtype, layer, _within(slots, S), values)
    return Ring(inputs, jnp.asarray(starts), jnp.asarray(counts), jnp.asarray(order))


def _tokens(shapes: dict[str, Any]) -> int:
    """T: of the first argument that has one entry a token."""
    return next(shapes[name].shape[1] for name in ("x", "q", "query") if name in shapes)


def _slots(shapes: dict[str, Any]) -> int:
    return next(
        shapes[name].shape[axis] for name, axis in (("state", 1), ("conv_state", 1), ("keys", 0)) if name in shapes
    )


def _within(slots: np.ndarray, number: int) -> np.ndarray:
    """-1 would be the last slot."""
    return np.where(slots >= 0, slots, number)


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name in _BETWEEN:
        low, high = _BETWEEN[name]
        return low + (high - low) * rng.random(shape, np.float32)
    return rng.standard_normal(shape, np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _placed(shape, dtype, layer, slots, values):
    """NaN but for the slots of one layer."""
    return jnp.full(shape, jnp.nan, dtype).at[layer, slots].set(values.astype(dtype), mode="drop")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _hashed(shape, dtype, sign):
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        place = place * jnp.uint32(2654435761) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return (sign * ((place >> 8).astype(jnp.float32) / 2**24)).astype(dtype)
