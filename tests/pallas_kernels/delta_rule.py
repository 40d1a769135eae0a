"""The gated delta rule by its definition, in float64 NumPy, and random passes to try the op on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.gated_delta_update import gates
from pallas_kernels.ring import Ring

# Odd on purpose: nothing fills a block, and two value heads share a key head.
L, S, B, T, Hk, Hv, V, K, Q = 2, 7, 5, 4, 2, 4, 5, 6, 9
LAYER = 1
KEPT = ("k", "v", "g", "beta")


class Pass(NamedTuple):
    """One call's arguments as NumPy arrays: `state` of one layer holds NaN where nobody may look."""

    state: np.ndarray
    inputs: dict[str, np.ndarray]
    slots: np.ndarray
    num_tokens: np.ndarray
    parents: np.ndarray

    def rows(self):
        """Rows that have a slot: (row, slot, tokens)."""
        return [(b, s, n) for b, (s, n) in enumerate(zip(self.slots, self.num_tokens, strict=True)) if 0 <= s < S]


def random_inputs(rng, rows, tokens, dtype, per_channel):
    """q, k, v in a dtype, and gates as a layer would have them."""

    def normal(*shape):
        return rng.normal(size=(rows, tokens, *shape)).astype(dtype)

    channels = (K,) if per_channel else ()
    A_log, dt_bias = rng.uniform(-1, 1, Hv).astype(np.float32), rng.normal(size=(Hv, *channels)).astype(np.float32)
    g, beta = jax.tree.map(np.array, _gates(normal(Hv, *channels), normal(Hv), A_log, dt_bias))
    return {"q": normal(Hk, K), "k": normal(Hk, K), "v": normal(Hv, V), "g": g, "beta": beta}


_gates = jax.jit(gates)


def random_pass(rng, dtype, per_channel, start=True):
    """Five rows: a whole window, one without a slot, one without tokens, a short one, one past the pool's end."""
    slots, num_tokens = np.array([3, -1, 0, 5, S], np.int32), np.array([T, T, 0, 2, T], np.int32)
    inputs = random_inputs(rng, B, T, dtype, per_channel)
    behind = np.arange(T) >= num_tokens[:, None]
    for leaf in inputs.values():
        leaf[behind] = np.nan
    state = np.full((L, S, Hv, V, K), np.nan, dtype)
    state[LAYER, [3, 0, 5]] = rng.normal(size=(3, Hv, V, K)) if start else 0
    parents = np.array([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, -1, 0, 0], [-1, 0, 0, 0], [-1, 0, 1, 1]], np.int32)
    return Pass(state, inputs, slots, num_tokens, parents)


def random_ring(rng, given: Pass, counts, starts):
    """A ring whose slots hold `counts` inputs from `starts` on, in an order of their own, and NaN elsewhere."""
    history = random_inputs(rng, S, Q, given.inputs["k"].dtype, given.inputs["g"].ndim == 4)
    order = random_order(rng)
    held = (np.argsort(order, axis=1) - starts[:, None]) % Q < counts[:, None]
    inputs = {}
    for name in KEPT:
        inputs[name] = np.full((L, *history[name].shape), np.nan, history[name].dtype)
        inputs[name][LAYER][held] = history[name][held]
    return Ring(inputs, starts, counts, order)


def random_order(rng):
    """A permutation for each slot."""
    return rng.permuted(np.tile(np.arange(Q, dtype=np.int32), (S, 1)), axis=1)


def chain(nodes):
    """Parents of a chain."""
    return np.arange(nodes, dtype=np.int32) - 1


def along(start, inputs, parents, scale, round_to=None):
    """Outputs `[T, Hv, V]` and states `[T, Hv, V, K]` of one row in float64; states are rounded to a dtype, if any."""
    q, k, v, g, beta = (np.asarray(inputs[name], np.float64) for name in ("q", *KEPT))
    g = g if g.ndim == 3 else g[..., None]
    outputs, states = [], []
    for t, parent in enumerate(parents):
        state = np.asarray(start, np.float64) if parent < 0 else states[parent]
        key, query = (np.repeat(_unit(x[t]), Hv // Hk, axis=0) for x in (k, q))
        decayed = state * np.exp(g[t])[:, None, :]
        update = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", decayed, key))
        state = decayed + update[..., None] * key[:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, query) * scale)
        states.append(state if round_to is None else state.astype(round_to).astype(np.float64))
    return np.array(outputs), np.array(states)


def tolerance(*dtypes):
    """A few roundings of the widest-spaced dtype, float32 at least."""
    return 8 * max(float(ml_dtypes.finfo(dtype).eps) for dtype in (np.float32, *dtypes))


def close(actual: Any, expected: Any, *dtypes):
    """Asserts equality to a few roundings of values of size one."""
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=tolerance(*dtypes) * scale)


def _unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def on_device(tree):
    """NumPy arrays as JAX arrays, copies of them."""
    return jax.tree.map(jnp.array, tree)
