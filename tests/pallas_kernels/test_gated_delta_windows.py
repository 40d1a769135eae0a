"""The chunked kernel on windows and states of several blocks, none of them whole, and where its arithmetic is hard."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_update import gated_delta_update
from pallas_kernels.ring import Ring, extend, must_fold
from tests.pallas_kernels import delta_rule
from tests.pallas_kernels.delta_rule import KEPT, Hk, Hv, along, chain, close
from tests.pallas_kernels.runs import RUNS

SCALE = 0.3


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of a test with two rows of two slots, and dtypes of state and inputs."""

    T: int
    V: int
    K: int
    state: str = "float32"
    inputs: str = "float32"
    per_channel: bool = False


REPLAYED = Dims(T=12, V=5, K=6), Dims(T=5, V=20, K=6, state="bfloat16", per_channel=True)


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def verify(state, inputs, slots, kept):
    num_tokens = jnp.full(slots.shape, inputs["k"].shape[1], jnp.int32)
    options = {"layer": 0, "scale": SCALE, "form": "chunk"} | RUNS["triton"]
    return gated_delta_update(state, **inputs, slots=slots, num_tokens=num_tokens, **kept, **options)


def draw_inputs(rng, dims, rows, tokens):
    """With decays from almost none to almost all."""

    def normal(*shape):
        return np.array(jnp.asarray(rng.normal(size=(rows, tokens, *shape)), dims.inputs))

    g = -np.exp(rng.uniform(-6, 4, (rows, tokens, Hv, *([dims.K] if dims.per_channel else [])))).astype(np.float32)
    beta = rng.uniform(size=(rows, tokens, Hv)).astype(np.float32)
    return {"q": normal(Hk, dims.K), "k": normal(Hk, dims.K), "v": normal(Hv, dims.V), "g": g, "beta": beta}


def draw_state(rng, dims):
    return np.array(jnp.asarray(rng.normal(size=(1, 2, Hv, dims.V, dims.K)), dims.state))


def rows_of(inputs, row):
    return {name: leaf[row] for name, leaf in inputs.items()}


@pytest.mark.parametrize("dims", [
    Dims(T=3, V=35, K=70, inputs="bfloat16"), Dims(T=20, V=3, K=18, state="float16", per_channel=True),
], ids=["two-blocks", "two-halves"])  # fmt: skip
def test_snapshots_of_a_tree(dims):
    rng = np.random.default_rng(0)
    state, inputs = draw_state(rng, dims), draw_inputs(rng, dims, 2, dims.T)
    parents = np.array([rng.integers(-1, t, size=2) if t else [-1, -1] for t in range(dims.T)], np.int32).T
    kept = {"snapshots": np.full((1, 2, dims.T, *state.shape[2:]), np.nan, state.dtype), "parents": parents}
    result = verify(*delta_rule.on_device((state, inputs, np.array([1, 0], np.int32), kept)))
    for row, slot in enumerate((1, 0)):
        o, states = along(state[0, slot], rows_of(inputs, row), parents[row], SCALE)
        close(result.y[row], o, inputs["v"].dtype)
        close(result.snapshots[0, row], states, state.dtype)


@pytest.mark.parametrize("dims", REPLAYED[:1], ids=["per-head"])
def test_replay_goes_on_from_window_to_window(dims):
    """With histories of more tokens than are folded at once, folds, and tokens that were not accepted."""
    rng = np.random.default_rng(1)
    length = 40
    state, slots = draw_state(rng, dims), np.array([1, 0], np.int32)
    entries = draw_inputs(rng, dims, 2, length)
    inputs = {name: np.full_like(entries[name][None], np.nan) for name in KEPT}
    order = rng.permuted(np.tile(np.arange(length, dtype=np.int32), (2, 1)), axis=1)
    ring = Ring(inputs, np.array([33, 0], np.int32), np.zeros(2, np.int32), order)
    pool, ring, expected = *delta_rule.on_device((state, ring)), state[0, slots].astype(np.float64)
    histories = set()
    for _ in range(60 // dims.T):
        window, counts = draw_inputs(rng, dims, 2, dims.T), ring.counts[slots]
        fold = must_fold(counts, dims.T, dims.T, length)
        result = verify(pool, *delta_rule.on_device((window, slots)), {"ring": ring, "fold": fold})
        accepted = rng.integers(dims.T // 2, dims.T + 1, 2).astype(np.int32)
        for row, count in enumerate(accepted):
            o, states = along(expected[row], rows_of(window, row), chain(dims.T), SCALE)
            close(result.y[row], o, dims.state, window["v"].dtype)
            expected[row] = states[count - 1]
        histories |= {int(count) for count in counts}
        pool, ring = result.state, extend(result.ring, slots, fold, accepted)
    assert max(histories) > 16
    assert 0 in histories


def test_keys_that_repeat_and_are_never_forgotten():
    """The inverse of the system is as large as it gets, and its powers much larger."""
    dims = Dims(T=16, V=5, K=6)
    rng = np.random.default_rng(2)
    state, inputs = draw_state(rng, dims), draw_inputs(rng, dims, 2, dims.T)
    inputs["k"][:], inputs["beta"][:], inputs["g"][:] = inputs["k"][:, :1], 1, 0
    slots = np.array([1, 0], np.int32)
    result = verify(*delta_rule.on_device((state, inputs, slots, {})))
    for row, slot in enumerate(slots):
        o, states = along(state[0, slot], rows_of(inputs, row), chain(dims.T), SCALE)
        close(result.y[row], o)
        close(result.state[0, slot], states[-1])
