"""The functions of a tree's parents against plain Python, and what is refused as no tree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from mamba_spec_jax.cache.tree import Tree, check_parents

from ..trees import path, trees

B, T = 3, 9


@jax.jit
def everything(parents, node):
    tree = Tree.create(parents)
    return tree.ancestors, tree.depths, tree.path_to(node)


@settings(max_examples=30)
@given(parents=trees(B, T))
def test_against_walking_up(parents):
    for t in range(T):
        mask, depth, whole = everything(parents, np.full(B, t, np.int32))
        for b in range(B):
            nodes = path(parents[b], t)
            np.testing.assert_array_equal(np.flatnonzero(mask[b, t]), nodes)
            assert depth[b, t] == len(nodes) - 1
            np.testing.assert_array_equal(whole[b], (nodes + [-1] * T)[:T])


def test_nodes_that_do_not_exist_have_no_path():
    parents = np.array([[-1, 0, 1]] * 4, np.int32)
    found = Tree.create(parents).path_to(jnp.array([-1, 3, -7, 2]))
    np.testing.assert_array_equal(found, [[-1] * 3, [-1] * 3, [-1] * 3, [0, 1, 2]])


def test_what_is_no_earlier_node_is_no_parent():
    parents = np.array([[5, 0, 2, 7, -9, 4]], np.int64)
    tree = Tree.create(parents)
    np.testing.assert_array_equal(tree.parents, [[-1, 0, -1, -1, -1, 4]])
    np.testing.assert_array_equal(tree.depths, [[0, 1, 0, 0, 0, 1]])


def test_under_vmap():
    parents = np.array([[[-1, 0, 0]], [[-1, 0, 1]]], np.int32)
    together = jax.vmap(lambda parents: Tree.create(parents).depths)(parents)
    np.testing.assert_array_equal(together, [[[0, 1, 1]], [[0, 1, 2]]])


GOOD = np.array([[-1, 0, 0], [-1, 0, 1]], np.int32)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (GOOD[:1], "verify got parents int32[1, 3], expected int32[2, 3]"),
        (GOOD.astype(np.float32), "verify got parents float32[2, 3], expected int32[2, 3]"),
        (
            np.array([[-1, 0, 2], [0, -2, 1]], np.int32),
            "verify: a parent must come before its child, and the root has none (-1): parents[0, 2] is 2, expected "
            "-1..1; parents[1, 0] is 0, expected -1..-1; parents[1, 1] is -2, expected -1..0",
        ),
    ],
)
def test_what_is_refused(parents, message):
    check_parents("verify", GOOD, (2, 3))
    for known in (parents, jnp.asarray(parents)):
        with pytest.raises(ValueError, match=re.escape(message)):
            check_parents("verify", known, (2, 3))
    with pytest.raises(ValueError, match=re.escape(message)):  # a constant of the traced program
        jax.eval_shape(lambda: check_parents("verify", parents, (2, 3)))


def test_values_that_are_not_known_yet_are_let_through():
    late = jnp.array([[-1, 2, 1]])
    jax.jit(lambda parents: check_parents("verify", parents, (1, 3)))(late)
