"""Mamba-2's recurrence by its definition, in float64 NumPy, row by row; and pools, rings and windows to try it on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ring import Ring

LAYER = 1  # of two: the other must stay as it is
SLOTS = np.array([4, -1, 0, 9, 2], np.int32)  # two rows without a slot: padding, and out of range
LIVE = (0, 2, 4)  # rows with a slot
FOLD = np.array([True, True, False, True, True])
REAL = np.array([3, 3, 1, 2, 2])  # tokens of each row that are real; dt is 0 behind them
PARENTS = np.array([[-1, 0, 0], [-1, -1, 1], [-1, 0, 1], [-1, 0, 0], [-1, 0, -1]], np.int32)


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of one test: two stretches of P and of N in the kernels, neither of them whole."""

    S: int = 6
    H: int = 4
    P: int = 33
    N: int = 40
    G: int = 2
    T: int = 3
    Q: int = 7


@dataclasses.dataclass(frozen=True)
class Scene:
    """Arguments of the op as NumPy arrays; whatever no row may read is NaN."""

    state: np.ndarray
    inputs: dict
    A: np.ndarray
    D: np.ndarray
    snapshots: np.ndarray
    ring: Ring


def scene(dims: Dims, state_dtype: str, dtype: str, seed: int = 0) -> Scene:
    """Random states of rows that have a slot, and histories that wrap, are empty, and leave just enough room."""
    rng = np.random.default_rng(seed)
    S, H, P, N, G, T, Q = dataclasses.astuple(dims)
    B = SLOTS.size

    def draw(*shape):
        return np.array(jnp.asarray(rng.normal(size=shape), dtype))

    def steps(*shape):
        return rng.uniform(0.02, 1, shape).astype(np.float32)

    state = np.full((2, S, H, P, N), np.nan)
    state[LAYER, SLOTS[list(LIVE)]] = rng.normal(size=(len(LIVE), H, P, N))
    dt = steps(B, T, H)
    dt[np.arange(T) >= REAL[:, None]] = 0
    starts, counts = np.array([2, 0, Q - 1, 0, Q - 2, 0], np.int32), np.array([2, 0, 0, 0, Q - T, 0], np.int32)
    kept = {"x": draw(2, S, Q, H, P), "dt": steps(2, S, Q, H), "B": draw(2, S, Q, G, N)}
    order = rng.permuted(np.tile(np.arange(Q, dtype=np.int32), (S, 1)), axis=1)
    place = (np.argsort(order, axis=1) - starts[:, None]) % Q
    in_history = np.broadcast_to(place < counts[:, None], (2, S, Q)) & (np.arange(2) == LAYER)[:, None, None]
    for leaf in kept.values():
        leaf[~in_history] = np.nan
    return Scene(
        state=np.array(jnp.asarray(state, state_dtype)),
        inputs={"x": draw(B, T, H, P), "dt": dt, "B": draw(B, T, G, N), "C": draw(B, T, G, N)},
        A=-rng.uniform(0.1, 2, H).astype(np.float32),
        D=rng.normal(size=H).astype(np.float32),
        snapshots=np.full((2, B, T, H, P, N), np.nan).astype(state.dtype if state_dtype == "float64" else state_dtype),
        ring=Ring(kept, starts, counts, order),
    )


def advance(h, token, A, form, dtype):
    """One token (arrays without B and T): the state `[H, P, N]` after it, rounded as it is kept, and unrounded."""
    x, dt, B, _ = (np.asarray(leaf, np.float64) for leaf in token)
    B = np.repeat(B, h.shape[0] // B.shape[0], axis=0)
    exact = np.exp(dt * A)[:, None, None] * h + (dt[:, None] * x)[..., None] * B[:, None]
    return (rounded(exact, dtype) if form == "step" else exact), exact


def rounded(values, dtype):
    """What storing does to float64 values."""
    return np.asarray(np.asarray(values).astype(np.float32).astype(dtype), np.float64)


def histories(scene: Scene, form: str, counts=None) -> np.ndarray:
    """`[B, H, P, N]` after each row's history, in float64."""
    _, S, Q = scene.ring.inputs["dt"].shape[:3]
    states = []
    for slot in SLOTS:
        if not 0 <= slot < S:
            states.append(np.zeros(scene.state.shape[2:]))
            continue
        h = np.asarray(scene.state[LAYER, slot], np.float64)
        for i in range(scene.ring.counts[slot] if counts is None else counts[len(states)]):
            at = LAYER, slot, scene.ring.order[slot, (scene.ring.starts[slot] + i) % Q]
            x, dt, B = (scene.ring.inputs[name][at] for name in ("x", "dt", "B"))
            h, _ = advance(h, (x, dt, B, B), scene.A, form, scene.state.dtype)
        states.append(h)
    return np.stack(states)


def window(scene: Scene, h0: np.ndarray, form: str, parents) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[B, T, H, P]` and states `[B, T, H, P, N]` of the window, in float64; a chain without parents."""
    B, T, H, _ = scene.inputs["x"].shape
    outputs, states = np.zeros(scene.inputs["x"].shape), np.zeros((B, T, *h0.shape[1:]))
    for b in range(B):
        for t in range(T):
            parent = t - 1 if parents is None else parents[b, t]
            before = h0[b] if parent < 0 else states[b, parent]
            token = [scene.inputs[name][b, t] for name in ("x", "dt", "B", "C")]
            states[b, t], exact = advance(before, token, scene.A, form, scene.state.dtype)
            x, C = np.asarray(token[0], np.float64), np.asarray(token[3], np.float64)
            C = np.repeat(C, H // C.shape[0], axis=0)
            outputs[b, t] = (exact * C[:, None]).sum(axis=-1) + scene.D[:, None] * x
    return outputs, states


def tolerance(*dtypes) -> float:
    """Errors of float32 sums of dozens of numbers of order 1, and a few roundings to each of the dtypes."""
    return 4e-6 + sum(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes)


def close(actual, expected, *dtypes) -> None:
    actual, limit = np.asarray(actual, np.float64), tolerance(*dtypes)
    np.testing.assert_allclose(actual, np.asarray(expected, np.float64), rtol=limit, atol=limit)


def same_bits(actual, expected) -> None:
    """Equality of every byte."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    integer = f"u{actual.dtype.itemsize}"
    np.testing.assert_array_equal(actual.view(integer), expected.view(integer))


def arrays(tree):
    """The same tree of JAX arrays."""
    return jax.tree.map(jnp.asarray, tree)
