"""state_scatter against its definition: every implementation, exact, other bytes untouched."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import state_scatter
from tests.pallas_kernels import oracle
from tests.pallas_kernels.draws import index_sets
from tests.pallas_kernels.runs import EXAMPLES, every_run, filler, jitted

# name: (L, S, R, T, B, tracked, leaves); sizes odd on purpose, one leaf longer than a block.
CASES = {
    "mixed": (2, 7, 4, 3, 3, True, {"a": ((5,), "f32"), "b": {"c": ((2, 3), "bf16"), "d": ((), "int8")}}),
    "untracked": (3, 5, 2, 1, 2, False, {"a": ((129,), "f16"), "b": ((1, 1, 1), "int8")}),
    "blocks": (1, 4, 3, 5, 2, True, {"a": ((4099,), "f32"), "b": ((8192,), "bf16")}),
}


def build(rng, leaves, lead, fill):
    if isinstance(leaves, tuple):
        return fill(rng, (*lead, *leaves[0]), oracle.DTYPES[leaves[1]])
    return {name: build(rng, leaf, lead, fill) for name, leaf in leaves.items()}


@functools.cache
def compiled(run):
    return jitted(state_scatter, run)


@every_run
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(run, case):
    layers, slots, rows, steps, batch, tracked, leaves = CASES[case]

    @settings(max_examples=EXAMPLES[run], deadline=None, derandomize=True, database=None)
    @given(sets=index_sets(batch, slots, rows, steps, tracked), seed=st.integers(0, 2**32 - 1))
    def check(sets, seed):
        rng = np.random.default_rng(seed)
        dst = build(rng, leaves, (layers, slots), filler(run))
        src = build(rng, leaves, (layers, rows, steps), filler(run))
        expected = jax.tree.map(lambda d, s: oracle.scatter(d, s, sets), dst, src)
        arrays = {name: value for name, value in sets._asdict().items() if value is not None}
        actual = compiled(run)(dst, src, **arrays)
        jax.tree.map(lambda a, e: np.testing.assert_array_equal(oracle.bits(a), oracle.bits(e)), actual, expected)

    check()


@every_run
def test_empty_batch_leaves_dst_alone(run):
    rng = np.random.default_rng(0)
    dst = {"a": oracle.random_bytes(rng, (2, 3, 5), np.float32)}
    src = {"a": oracle.random_values(rng, (2, 4, 2, 5), np.float32)}
    none = np.zeros(0, np.int32)
    actual = compiled(run)(dst, src, none, none, track_slots=none, track_steps=none)
    np.testing.assert_array_equal(oracle.bits(actual["a"]), oracle.bits(dst["a"]))


@every_run
def test_leaves_without_elements_pass_through(run):
    dst = {"a": np.zeros((2, 3, 0), np.float32), "b": np.zeros((2, 3, 2), np.float32)}
    src = {"a": np.zeros((2, 4, 2, 0), np.float32), "b": np.ones((2, 4, 2, 2), np.float32)}
    actual = compiled(run)(dst, src, np.array([1], np.int32), np.array([0], np.int32))
    assert actual["a"].shape == (2, 3, 0)
    np.testing.assert_array_equal(actual["b"], oracle.scatter(dst["b"], src["b"], oracle.Sets([1], [0], [0])))


@every_run
def test_vectorises_over_more_entries_than_rows(run):
    """rows may name one source row for several entries."""
    rng = np.random.default_rng(1)
    dst, src = rng.standard_normal((2, 6, 3)), rng.standard_normal((2, 2, 3, 3))
    dst, src = dst.astype(np.float32), src.astype(np.float32)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([5, 1, 3, 0], [0, 1, 2, 0], [1, 1, 0, 1])))
    actual = compiled(run)(dst, src, sets.slots, sets.steps, rows=sets.rows)
    np.testing.assert_array_equal(actual, oracle.scatter(dst, src, sets))


def test_moves_the_bits_of_every_dtype():
    """NaNs with their payloads, signalling ones too, in the states that are moved and in slots that nobody names."""
    rng = np.random.default_rng(2)
    dst = {name: oracle.random_bytes(rng, (2, 5, 67), dtype) for name, dtype in oracle.ALL_DTYPES.items()}
    src = {name: oracle.random_bytes(rng, (2, 3, 2, 67), dtype) for name, dtype in oracle.ALL_DTYPES.items()}
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([3, -1], [1, 0], [2, 0], [0, 4], [0, 7])))
    arrays = {name: value for name, value in sets._asdict().items() if value is not None}
    actual = compiled("xla")(dst, src, **arrays)
    wrong = [name for name in dst if actual[name].tobytes() != oracle.scatter(dst[name], src[name], sets).tobytes()]
    assert wrong == []
