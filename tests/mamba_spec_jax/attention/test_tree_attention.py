"""Attention over draft trees: a chain's bits where the tree is one, ancestors alone elsewhere, and rows moved up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.cache.pools import HybridCache, KVCache
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.modes import ForwardMode

from ..trees import chains, path
from . import oracle
from .recurrent import assert_same_bits

SLOTS, MAX_LEN, HQ, HKV, DH, T = 5, 28, 4, 2, 6, 5
SLOT = np.array([3, -1, 0, 4], np.int32)
LENGTHS = np.array([7, 0, 20, 0], np.int32)
COUNTS = np.array([5, 0, 3, 4], np.int32)
REAL = np.arange(T) < COUNTS[:, None]
PARENTS = np.array([[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 1, 0, 3]], np.int32)
ATTENTION = FullAttention(0.3, block=8)


@jax.jit
def attend(inputs, kv, parents=None):
    lengths = jnp.zeros(SLOTS, jnp.int32).at[SLOT].set(LENGTHS)
    cache = HybridCache(None, kv, lengths, MAX_LEN)  # type: ignore[arg-type]
    batch = ForwardBatch.create(ForwardMode.TARGET_VERIFY, cache, SLOT, COUNTS, T, parents=parents)
    return ATTENTION.forward(0, inputs, kv, batch)


@jax.jit
def commit(kv, path):
    return ATTENTION.commit(kv, SLOT, LENGTHS, path)


def scene(dtype="float32"):
    """Inputs, NaN where no token is real, and buffers that hold NaN past the committed rows."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(len(SLOT), T, heads, DH)) for heads in (HQ, HKV, HKV)]
    buffers = rng.normal(size=(2, SLOTS, MAX_LEN, HKV, DH))
    for leaf in inputs:
        leaf[~REAL] = np.nan
    for slot, length in zip(SLOT, LENGTHS, strict=True):
        buffers[:, slot, length:] = np.nan
    keys, values = (jnp.asarray(buffer, dtype) for buffer in buffers)
    return AttentionInputs(*(jnp.asarray(leaf, dtype) for leaf in inputs)), KVCache((keys,), (values,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tree_that_is_a_chain_has_the_bits_of_the_chain(dtype):
    inputs, kv = scene(dtype)
    expected, chain_kv = attend(inputs, kv)
    output, tree_kv = attend(inputs, kv, chains(len(SLOT), T))
    assert_same_bits(np.asarray(output)[REAL], np.asarray(expected)[REAL], "outputs")
    jax.tree.map(assert_same_bits, tree_kv, chain_kv)
    along = np.where(np.arange(T) < COUNTS[:, None], np.arange(T), -1)
    jax.tree.map(assert_same_bits, commit(tree_kv, along), chain_kv)


def test_a_node_sees_its_ancestors_and_an_accepted_path_moves_up():
    inputs, kv = scene()
    output, after = attend(inputs, kv, PARENTS)
    node = np.array([4, 3, 2, 3], np.int32)  # paths 0 1 4; a padding row's; 0 2; 0 3
    moved = commit(after, Tree.create(PARENTS).path_to(jnp.where(SLOT >= 0, node, -1)))
    wanted = [np.array(buffer) for buffer in jax.tree.leaves(after)]
    for row in np.flatnonzero(SLOT >= 0):
        slot, length = SLOT[row], LENGTHS[row]
        for t in range(COUNTS[row]):
            nodes = path(PARENTS[row], t)

            def along(buffer, window, slot=slot, length=length, row=row, nodes=nodes):
                return np.concatenate([buffer[0][slot, :length], window[row, nodes]]).astype(np.float64)

            query = np.asarray(inputs.query[row, t : t + 1], np.float64)
            expected = oracle.attention(query, along(kv.keys, inputs.key), along(kv.values, inputs.value), 0.3)
            np.testing.assert_allclose(output[row, t], expected[0], rtol=2e-5, atol=2e-5)
        for buffer, window in zip(wanted, (inputs.key, inputs.value), strict=True):
            for depth, t in enumerate(path(PARENTS[row], node[row])):
                buffer[slot, length + depth] = window[row, t]
    np.testing.assert_array_equal(output[1], 0, err_msg="a padding row sees nothing")
    for buffer, expected in zip(jax.tree.leaves(moved), wanted, strict=True):
        assert_same_bits(buffer, expected, "the path's rows, and not a byte besides")
