"""causal_conv1d_update against its definition in float64, against the commit, and against itself token by token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_conv1d_update, state_commit
from pallas_kernels.causal_conv1d_update import triton
from tests.pallas_kernels.ssm import close, same_bits

LAYER = 1
SLOTS = np.array([3, -1, 0, 7], np.int32)
LIVE = [0, 2]
RUNS = {"xla": {}, "triton": {"implementation": "triton", "interpret": True}}


class Case(NamedTuple):
    """W, T, C, and the dtypes of the pool and of the inputs."""

    width: int
    tokens: int
    channels: int
    pool: str
    dtype: str


CASES = {
    "verify": Case(4, 7, 259, "float32", "float32"),
    "stretches": Case(3, 35, 5, "bfloat16", "bfloat16"),
    "wide": Case(4, 8, 6, "float16", "float16"),
    "mixed": Case(2, 2, 5, "bfloat16", "float32"),
    "pointwise": Case(1, 3, 4, "float32", "float32"),
}


def call(x, pool, weight, bias, *, run="xla", **options):
    return causal_conv1d_update(x, pool, weight, bias, layer=LAYER, slots=jnp.asarray(SLOTS), **RUNS[run], **options)


exactly = jax.jit(call, static_argnames="run")
convolve = jax.jit(call, static_argnames="run", compiler_options={"xla_backend_optimization_level": 0})


def draw(case, seed=0):
    """x, a pool that is NaN where no row may look, weight and bias."""
    rng = np.random.default_rng(seed)
    pool = np.full((2, 5, case.width - 1, case.channels), np.nan)
    pool[LAYER, SLOTS[LIVE]] = rng.normal(size=(len(LIVE), case.width - 1, case.channels))
    x = rng.normal(size=(SLOTS.size, case.tokens, case.channels))
    weight, bias = rng.normal(size=(case.width, case.channels)), rng.normal(size=case.channels)
    return (
        np.array(jnp.asarray(x, case.dtype)),
        np.array(jnp.asarray(pool, case.pool)),
        np.array(jnp.asarray(weight, case.dtype)),
        np.array(jnp.asarray(bias, case.dtype)),
    )


def streams(x, pool):
    """`[B, W-1+T, C]`: each row's window, zeros without a slot, and its inputs as the pool holds them."""
    window = np.zeros((SLOTS.size, *pool.shape[2:]), pool.dtype)
    window[LIVE] = pool[LAYER, SLOTS[LIVE]]
    return np.concatenate([window, np.asarray(jnp.asarray(x).astype(pool.dtype))], axis=1)


def definition(x, pool, weight, bias, parents=None):
    """The outputs, token by token along its path."""
    stream, (B, T, _), width = streams(x, pool).astype(np.float64), x.shape, weight.shape[0]
    outputs = np.zeros(x.shape)
    for b in range(B):
        for t in range(T):
            path, node = [], t
            while node >= 0:
                path.insert(0, width - 1 + node)
                node = node - 1 if parents is None else parents[b, node]
            seen = stream[b, [*range(width - 1), *path]][-width:]
            total = (seen * weight.astype(np.float64)).sum(axis=0) + (0 if bias is None else bias.astype(np.float64))
            outputs[b, t] = total / (1 + np.exp(-total))
    return outputs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", RUNS)
def test_decoding_advances_the_windows(run, name, monkeypatch):
    case = CASES[name]
    if name == "wide":  # a program takes fewer tokens than the window reaches into
        monkeypatch.setattr(triton, "_TOKENS", 2)
    x, pool, weight, bias = draw(case)
    num_tokens = np.array([case.tokens, 0, case.tokens // 2, case.tokens], np.int32)
    result = convolve(x, pool, weight, bias, run=run, num_tokens=num_tokens)
    close(result.y, definition(x, pool, weight, bias), case.dtype)
    assert result.y.dtype == x.dtype
    expected, stream = pool.copy(), streams(x, pool)
    for row in LIVE:
        expected[LAYER, SLOTS[row]] = stream[row, num_tokens[row] : num_tokens[row] + case.width - 1]
    same_bits(result.conv_state, expected)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", ["verify", "mixed"])
@pytest.mark.parametrize("run", RUNS)
def test_a_verify_records_its_inputs(run, name, tree):
    case = CASES[name]
    x, pool, weight, _ = draw(case)
    rng = np.random.default_rng(1)
    parents = np.array([[rng.integers(-1, t) if t else -1 for t in range(case.tokens)] for _ in SLOTS], np.int32)
    record = np.full((2, *x.shape), np.nan).astype(pool.dtype)
    options = {"conv_inputs": record} | ({"parents": parents} if tree else {})
    result = convolve(x, pool, weight, None, run=run, **options)
    close(result.y, definition(x, pool, weight, None, parents if tree else None), case.dtype)
    same_bits(result.conv_state, pool)
    record[LAYER] = streams(x, pool)[:, case.width - 1 :]
    same_bits(result.conv_inputs, record)


def test_a_token_has_the_same_bits_alone_and_among_others():
    case = CASES["verify"]
    x, pool, weight, bias = draw(case)
    together, alone = exactly(x, pool, weight, bias), []
    for t in range(case.tokens):
        result = exactly(x[:, t : t + 1], pool, weight, bias)
        pool = result.conv_state
        alone.append(result.y[:, 0])
    same_bits(np.stack(alone, axis=1)[LIVE], np.asarray(together.y)[LIVE])
    same_bits(pool, together.conv_state)


def test_committing_the_record_is_advancing():
    case = CASES["verify"]
    x, pool, weight, bias = draw(case)
    num_tokens = np.array([5, 0, 2, 0], np.int32)
    record = convolve(x, pool, weight, bias, conv_inputs=jnp.zeros((2, *x.shape), pool.dtype)).conv_inputs
    _, committed = state_commit([], pool, [], record, jnp.asarray(SLOTS), jnp.asarray(num_tokens - 1))
    advanced = convolve(x, pool, weight, bias, num_tokens=num_tokens).conv_state
    same_bits(committed[LAYER], advanced[LAYER])
