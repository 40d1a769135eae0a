"""state_commit against its definition: every implementation, exact, other bytes untouched."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import state_commit
from tests.pallas_kernels import oracle
from tests.pallas_kernels.draws import index_sets, trees
from tests.pallas_kernels.runs import EXAMPLES, every_run, filler, jitted


class Case(NamedTuple):
    """Static part of one test: dims, W, dtypes, what is passed."""

    layers: int
    slots: int
    rows: int
    nodes: int
    batch: int
    width: int
    channels: int
    state: tuple[int, ...]
    ssm: str
    conv: str
    tree: bool
    tracked: bool


CASES = {
    "chain": Case(2, 7, 4, 5, 3, 4, 6, (2, 3), "f32", "bf16", tree=False, tracked=True),
    "untracked": Case(1, 5, 2, 3, 2, 2, 5, (7,), "bf16", "f32", tree=False, tracked=False),
    "tree": Case(2, 7, 3, 7, 3, 5, 3, (5,), "f16", "f16", tree=True, tracked=True),
    "int8": Case(3, 4, 2, 4, 2, 3, 130, (), "int8", "int8", tree=True, tracked=False),
    "blocks": Case(1, 4, 2, 2, 2, 4, 1031, (4099,), "f32", "bf16", tree=False, tracked=True),
    "one node": Case(2, 4, 2, 1, 2, 4, 6, (3,), "f32", "f32", tree=False, tracked=True),
}


@functools.cache
def compiled(run):
    return jitted(state_commit, run, donate=(0, 1))


def commit(run, ssm, conv, states, inputs, sets, parents=None):
    arrays = {name: value for name, value in sets._asdict().items() if value is not None}
    return compiled(run)(ssm, conv, states, inputs, parents=parents, **arrays)


def pools(rng, case, run):
    ssm, conv = oracle.DTYPES[case.ssm], oracle.DTYPES[case.conv]
    fill = filler(run)
    return (
        fill(rng, (case.layers, case.slots, *case.state), ssm),
        fill(rng, (case.layers, case.slots, case.width - 1, case.channels), conv),
        fill(rng, (case.layers, case.rows, case.nodes, *case.state), ssm),
        fill(rng, (case.layers, case.rows, case.nodes, case.channels), conv),
    )


@every_run
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(run, name):
    check_against_definition(run, CASES[name], EXAMPLES[run])


def check_against_definition(run, case, examples):
    """Tries `examples` random index sets, trees and contents of one case."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(
        sets=index_sets(case.batch, case.slots, case.rows, case.nodes, case.tracked),
        parents=trees(case.batch, case.nodes) if case.tree else st.none(),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(sets, parents, seed):
        arrays = pools(np.random.default_rng(seed), case, run)
        expected = oracle.commit(*arrays, sets, parents)
        for part, want in zip(commit(run, *arrays, sets, parents), expected, strict=True):
            np.testing.assert_array_equal(oracle.bits(part), oracle.bits(want))

    check()


@every_run
def test_tracked_window_starts_from_the_old_window_of_the_live_slot(run):
    """Committing first and tracking second would form the tracked window from the new one."""
    ssm, states = np.zeros((1, 3, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
    conv = np.array([[[[1], [2], [3]], [[0], [0], [0]], [[0], [0], [0]]]], np.float32)
    inputs = np.array([[[[10], [20]]]], np.float32)
    zero, one, two = (np.array([i], np.int32) for i in range(3))
    _, new = commit(run, ssm, conv, states, inputs, oracle.Sets(zero, one, zero, two, zero))
    np.testing.assert_array_equal(new[0, :, :, 0], [[3, 10, 20], [0, 0, 0], [2, 3, 10]])


@every_run
def test_a_chain_is_the_tree_whose_parents_are_the_nodes_before(run):
    case = CASES["chain"]
    arrays = pools(np.random.default_rng(3), case, run)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([0, 6, 2], [4, 0, 2], [3, 0, 1], [1, 3, 5], [1, 4, 3])))
    parents = np.tile(np.arange(-1, case.nodes - 1, dtype=np.int32), (case.batch, 1))
    for chain, tree in zip(commit(run, *arrays, sets), commit(run, *arrays, sets, parents), strict=True):
        np.testing.assert_array_equal(oracle.bits(chain), oracle.bits(tree))


@every_run
def test_a_parent_that_is_not_earlier_ends_the_path(run):
    """Cyclic or wild parents read nothing out of bounds: the node counts as a root."""
    case = CASES["tree"]
    arrays = pools(np.random.default_rng(4), case, run)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([0, 3, 5], [6, 5, 4], [0, 1, 2], [1, 2, 4], [3, 3, 3])))
    wild = np.array([[0, 2, 1, 9, 4, 2**31 - 1, 6]] * case.batch, np.int32)
    expected = oracle.commit(*arrays, sets, np.full_like(wild, -1) + np.array([0, 0, 2, 0, 0, 0, 0], np.int32))
    for part, want in zip(commit(run, *arrays, sets, wild), expected, strict=True):
        np.testing.assert_array_equal(oracle.bits(part), oracle.bits(want))


@every_run
@pytest.mark.parametrize("present", ["ssm", "conv"])
def test_one_kind_of_leaf_is_enough(run, present):
    """Models of convolutions only, or of recurrences without one."""
    case = CASES["chain"]
    ssm, conv, states, inputs = pools(np.random.default_rng(5), case, run)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([0, 6, 2], [4, 0, 2], [3, 0, 1])))
    want_ssm, want_conv = oracle.commit(ssm, conv, states, inputs, sets)
    if present == "ssm":
        new_ssm, new_conv = commit(run, ssm, [], states, [], sets)
        assert new_conv == []
        np.testing.assert_array_equal(oracle.bits(new_ssm), oracle.bits(want_ssm))
    else:
        new_ssm, new_conv = commit(run, [], {"x": conv}, [], {"x": inputs}, sets)
        assert new_ssm == []
        np.testing.assert_array_equal(oracle.bits(new_conv["x"]), oracle.bits(want_conv))


@every_run
def test_leaves_of_several_widths(run):
    """Two kinds of convolution in one model; W = 1 keeps no window at all."""
    rng = np.random.default_rng(6)
    conv = [rng.standard_normal((2, 4, width - 1, 3)).astype(np.float32) for width in (1, 3, 4)]
    inputs = [rng.standard_normal((2, 2, 3, 3)).astype(np.float32) for _ in conv]
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([2, 0], [2, 1], [0, 1])))
    _, new = commit(run, [], conv, [], inputs, sets)
    nothing = np.zeros((2, 4, 1), np.float32), np.zeros((2, 2, 3, 1), np.float32)
    for part, window, raw in zip(new, conv, inputs, strict=True):
        np.testing.assert_array_equal(part, oracle.commit(nothing[0], window, nothing[1], raw, sets)[1])


@every_run
def test_empty_batch_leaves_the_pools_alone(run):
    case = CASES["chain"]
    arrays = pools(np.random.default_rng(7), case, run)
    none = np.zeros(0, np.int32)
    for part, before in zip(commit(run, *arrays, oracle.Sets(none, none, none, none, none)), arrays[:2], strict=True):
        np.testing.assert_array_equal(oracle.bits(part), oracle.bits(before))


@pytest.mark.parametrize("run", ["xla", "xla-off-cpu", "triton"])
def test_64_bit_mode_changes_nothing(run):
    case = CASES["chain"]
    arrays = pools(np.random.default_rng(8), case, run)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([0, 6, 2], [4, 0, 2], [3, 0, 1], [1, -1, 5], [1, 4, 3])))
    with jax.enable_x64(True):
        actual = commit(run, *arrays, sets)
    for part, want in zip(actual, oracle.commit(*arrays, sets), strict=True):
        np.testing.assert_array_equal(oracle.bits(part), oracle.bits(want))


def test_moves_the_bits_of_every_dtype():
    """NaNs with their payloads, signalling ones too, in what is moved and in slots that nobody names."""
    rng = np.random.default_rng(9)
    # A convolution's inputs are numbers: `state_commit` refuses the others.
    dtypes = [(name, dtype) for name, dtype in oracle.ALL_DTYPES.items() if name not in ("bool", "complex64")]

    def draw(*shape):
        return {name: oracle.random_bytes(rng, shape, dtype) for name, dtype in dtypes}

    ssm, conv, states, inputs = draw(2, 5, 67), draw(2, 5, 3, 9), draw(2, 3, 2, 67), draw(2, 3, 2, 9)
    sets = oracle.Sets(*(np.array(x, np.int32) for x in ([3, -1], [1, 0], [2, 0], [0, 4], [0, 7])))
    new_ssm, new_conv = commit("xla", ssm, conv, states, inputs, sets)
    wrong = []
    for name in ssm:
        want = oracle.commit(ssm[name], conv[name], states[name], inputs[name], sets)
        if (new_ssm[name].tobytes(), new_conv[name].tobytes()) != tuple(part.tobytes() for part in want):
            wrong.append(name)
    assert wrong == []
