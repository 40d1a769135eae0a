"""gated_delta_chunk against float64 and against the step form: prompts of any length, from any state."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gated_delta_chunk import gated_delta_chunk
from pallas_kernels.gated_delta_update import gates
from tests.pallas_kernels import delta_rule, oracle
from tests.pallas_kernels.delta_rule import LAYER, Hv, K, L, S, V, chain, close

TOKENS, LENGTHS = 37, np.array([37, 20, 0, 37, 1], np.int32)
SLOTS = np.array([3, 0, 5, -1, 6], np.int32)


@pytest.mark.parametrize(
    ("dtype", "per_channel", "chunk_size"),
    [(np.float32, False, 8), (np.float32, True, None), (ml_dtypes.bfloat16, False, None), (np.float16, True, 64)],
)
def test_outputs_and_states_are_those_of_the_recurrence(dtype, per_channel, chunk_size):
    rng = np.random.default_rng(0)
    inputs = delta_rule.random_inputs(rng, len(SLOTS), TOKENS, dtype, per_channel)
    for leaf in inputs.values():
        leaf[np.arange(TOKENS) >= LENGTHS[:, None]] = np.nan
    state = np.full((L, S, Hv, V, K), np.nan, dtype)
    state[LAYER, [3, 0, 5, 6]] = rng.normal(size=(4, Hv, V, K))
    call = jax.jit(functools.partial(gated_delta_chunk, layer=LAYER, chunk_size=chunk_size))
    o, after = jax.tree.map(np.asarray, call(state, **inputs, slots=SLOTS, num_tokens=LENGTHS))

    left = state.copy()
    for b, (slot, n) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        n = n if slot >= 0 else 0
        np.testing.assert_array_equal(o[b, n:], np.zeros_like(o[b, n:]))
        if n:
            row = {name: leaf[b, :n] for name, leaf in inputs.items()}
            outputs, states = delta_rule.along(state[LAYER, slot], row, chain(n), K**-0.5)
            close(o[b, :n], outputs, dtype)
            close(after[LAYER, slot], states[-1], dtype)
            left[LAYER, slot] = after[LAYER, slot]
    np.testing.assert_array_equal(oracle.bits(after), oracle.bits(left))


def test_strong_decays_over_a_long_chunk_keep_their_digits():
    """The sums of g grow past a thousand, and the decays between neighbours are still those of one token."""
    rng = np.random.default_rng(1)
    inputs = delta_rule.random_inputs(rng, 1, 64, np.float32, True)
    inputs["g"] = np.where(rng.random((1, 64, Hv, K)) < 0.5, -60.0, -1e-3).astype(np.float32)
    state = rng.normal(size=(1, 1, Hv, V, K)).astype(np.float32)
    one = np.array([0], np.int32)
    call = jax.jit(functools.partial(gated_delta_chunk, layer=0, chunk_size=64))
    o, after = call(state, **inputs, slots=one, num_tokens=one + 64)
    row = {name: leaf[0] for name, leaf in inputs.items()}
    outputs, states = delta_rule.along(state[0, 0], row, chain(64), K**-0.5)
    close(o[0], outputs)
    close(after[0, 0], states[-1])


def test_gates_are_float32_whatever_comes_in():
    rng = np.random.default_rng(2)
    a, b, A_log, dt_bias = (rng.normal(size=shape) for shape in ((3, 2, Hv), (3, 2, Hv), Hv, Hv))
    a, b = a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)
    g, beta = jax.jit(gates)(a, b, A_log.astype(np.float32), dt_bias.astype(np.float32))
    steps = np.log1p(np.exp(a.astype(np.float64) + dt_bias.astype(np.float32)))
    np.testing.assert_allclose(g, -np.exp(A_log.astype(np.float32)) * steps, rtol=1e-6)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b.astype(np.float64))), rtol=1e-6)


def test_a_gate_has_the_same_bits_in_windows_of_any_length():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 1, 7, 3)).astype(np.float32)
    A_log, dt_bias = rng.normal(size=(2, 3)).astype(np.float32)
    call = jax.jit(gates)
    whole = call(a, b, A_log, dt_bias)
    for t in range(7):
        for one, all_of_them in zip(call(a[:, t : t + 1], b[:, t : t + 1], A_log, dt_bias), whole, strict=True):
            np.testing.assert_array_equal(one[:, 0], all_of_them[:, t])


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_a_chunk_has_a_token_at_least(chunk_size):
    inputs = delta_rule.random_inputs(np.random.default_rng(4), 1, 2, np.float32, False)
    one = np.array([0], np.int32)
    with pytest.raises(ValueError, match=f"chunk_size is {chunk_size}, expected 1 at least"):
        gated_delta_chunk(
            np.zeros((1, 1, Hv, V, K), np.float32), **inputs, layer=0, slots=one, num_tokens=one, chunk_size=chunk_size
        )
