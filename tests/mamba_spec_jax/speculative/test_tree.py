"""Fixed topologies, and the choice of the best candidates against sorting them by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.speculative.tree import TreeTopology, select_best

from ..trees import trees

B, N = 2, 8
select = jax.jit(select_best, static_argnums=2)


def test_topologies():
    tree = TreeTopology.from_branching([3, 1, 2])
    assert tree.parents == (-1, 0, 0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3)
    assert (tree.T, tree.depth, tree.width) == (13, 3, 6)
    assert hash(tree) == hash(TreeTopology.from_branching((3, 1, 2)))
    assert TreeTopology.chain(4) == TreeTopology.from_branching([1, 1, 1])
    assert TreeTopology.chain(1).parents == (-1,)
    np.testing.assert_array_equal(TreeTopology.chain(3).rows(2), [[-1, 0, 1], [-1, 0, 1]])
    assert tree.rows(1).dtype == np.int32


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "expected -1, for the root, first"),
        ((0, 1), "expected -1, for the root, first"),
        ([-1, 0], "expected a tuple of integers"),
        ((-1, 0, 2), r"node 2 has parent 2, expected 0\.\.1: a parent must come before its child"),
        ((-1, 2, 0), r"node 1 has parent 2, expected 0\.\.0"),
        ((-1, -1), r"node 1 has parent -1, expected 0\.\.0"),
    ],
)
def test_what_is_no_topology(parents, message):
    with pytest.raises(ValueError, match=message):
        TreeTopology(parents)


def test_branching_needs_children():
    with pytest.raises(ValueError, match=r"got \(2, 0\), expected at least 1 child everywhere"):
        TreeTopology.from_branching([2, 0])


@settings(max_examples=40)
@given(
    parents=trees(B, N),
    steps=st.lists(st.sampled_from([0.0, -0.5, -1.0, -np.inf]), min_size=B * N, max_size=B * N),
    T=st.sampled_from([1, 4, N]),
)
def test_the_best_nodes_are_a_tree(parents, steps, T):
    """Drafts of probability 1 tie a child with its parent; impossible ones come last and hang on nothing."""
    joint = np.zeros((B, N), np.float32)
    for b in range(B):
        for t in range(1, N):
            joint[b, t] = joint[b, parents[b, t]] + steps[b * N + t]
    found = select(jnp.asarray(joint), parents, T)
    for b in range(B):
        possible = [t for t in range(1, N) if joint[b, t] > -np.inf]
        best = sorted(sorted(possible, key=lambda t: (-joint[b, t], t))[: T - 1])
        assert int(found.counts[b]) == len(best)
        nodes = [0, *best]
        assert np.asarray(found.nodes)[b, : len(nodes)].tolist() == nodes
        expected = [-1, *(nodes.index(parents[b, t]) for t in best)]
        assert np.asarray(found.parents)[b].tolist() == expected + [-1] * (T - len(expected))


def test_what_select_best_refuses():
    joint = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=r"joint_log_probs \[2, 3\] and parents \[2, 2\], expected \[B, N\] for both"):
        select_best(joint, np.zeros((2, 2), np.int32), 2)
    with pytest.raises(ValueError, match=r"T=4, expected 1\.\.3: there are 3 candidates"):
        select_best(joint, np.zeros((2, 3), np.int32), 4)
