"""More of tests/mamba_spec_jax/attention/test_tree_recurrence.py than a commit can wait for.

Not collected by default: `pytest tests/sweeps`.
"""

import itertools

import pytest
from hypothesis import given, settings

from mamba_spec_jax.modes import SpeculativeMode
from tests.mamba_spec_jax.attention import test_tree_recurrence as tree
from tests.mamba_spec_jax.trees import trees

COMBINATIONS = list(itertools.product((tree.SNAPSHOT, tree.REPLAY), tree.CASES))


@pytest.mark.parametrize(("strategy", "case"), COMBINATIONS)
def test_a_tree_that_is_a_chain(strategy, case):
    tree.check_chain(strategy, case)


@pytest.mark.parametrize(("strategy", "case"), COMBINATIONS)
@settings(max_examples=20)
@given(parents=trees(tree.B, tree.T), num_tokens=tree.counts)
def test_every_node(strategy, case, parents, num_tokens):
    tree.check_random_tree(strategy, case, SpeculativeMode.DECODE, parents, num_tokens, tree.assert_same_bits)
