"""More of tests/pallas_kernels than a commit can wait for: all combinations of the recurrences' kernels.

Not collected by default: `pytest tests/sweeps`.
"""

import itertools

import pytest

from tests.pallas_kernels import test_gated_delta_update as delta
from tests.pallas_kernels import test_gated_delta_windows as windows
from tests.pallas_kernels.test_selective_state_update import DTYPES, FORMS, KEPT, RUNS, check


@pytest.mark.parametrize(("state_dtype", "dtype"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize(("keep", "tree"), KEPT)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_every_combination(run, form, keep, tree, state_dtype, dtype):
    check(run, form, keep, tree, state_dtype, dtype)


@pytest.mark.parametrize("kind", delta.KINDS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_every_combination_of_the_gated_delta_rule(run, form, tree, kind):
    delta.test_snapshots_are_the_states_after_every_token(run, form, tree, kind)
    delta.test_a_ring_is_replayed_extended_and_folded(run, form, tree, kind)
    if not tree:
        delta.test_decoding_leaves_the_state_after_each_rows_tokens(run, form, tree, kind)


@pytest.mark.parametrize("dims", windows.REPLAYED)
def test_replay_of_the_gated_delta_rule_goes_on_from_window_to_window(dims):
    windows.test_replay_goes_on_from_window_to_window(dims)
