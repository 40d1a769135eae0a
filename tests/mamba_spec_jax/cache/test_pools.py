"""Shapes and bytes of the pools, lengths by slot, and the cache that awaits its commit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.cache.pools import HybridCache, PoolSpec, advance_lengths, gather_lengths, slot_index
from mamba_spec_jax.cache.records import Draft

SPEC = PoolSpec(
    recurrent_layers=2,
    heads=3,
    head_dim=5,
    state=7,
    conv_width=4,
    conv_channels=11,
    attention_layers=2,
    kv_heads=2,
    kv_head_dim=6,
    ssm_dtype="float32",
    conv_dtype="bfloat16",
    kv_dtype="float16",
)


def test_a_cache_has_the_shapes_dtypes_and_bytes_that_its_spec_says():
    cache = HybridCache.create(SPEC, slots=4, max_len=9)
    assert (cache.mamba.ssm.shape, cache.mamba.ssm.dtype) == ((2, 4, 3, 5, 7), jnp.float32)
    assert (cache.mamba.conv.shape, cache.mamba.conv.dtype) == ((2, 4, 3, 11), jnp.bfloat16)
    assert [(k.shape, k.dtype) for k in cache.kv.keys + cache.kv.values] == [((4, 9, 2, 6), jnp.float16)] * 4
    assert (cache.lengths.shape, cache.lengths.dtype) == ((4,), jnp.int32)
    assert (cache.slots, cache.max_len, cache.awaiting_commit) == (4, 9, False)
    assert not any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(cache))
    assert SPEC.ssm_bytes(4) == cache.mamba.ssm.nbytes
    assert SPEC.conv_bytes(4) == cache.mamba.conv.nbytes
    assert SPEC.kv_bytes(4, 9) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.kv))
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    assert len(set(buffers)) == len(buffers), "no buffer is shared, so that all can be donated"


def test_specs_are_static():
    same = dataclasses.replace(SPEC, ssm_dtype=jnp.float32)
    assert (same, hash(same)) == (SPEC, hash(SPEC))
    assert dataclasses.replace(SPEC, ssm_dtype=jnp.float16) != SPEC


def test_width_one_keeps_no_window():
    with pytest.raises(ValueError, match="conv_width is 1, expected at least 2: width 1 keeps no window"):
        dataclasses.replace(SPEC, conv_width=1)


@pytest.mark.parametrize("name", ["ssm_dtype", "conv_dtype", "kv_dtype"])
@pytest.mark.parametrize("dtype", ["bool", "complex64", "int8"])
def test_pools_hold_real_numbers(name, dtype):
    with pytest.raises(ValueError, match=f"PoolSpec.{name} is {dtype}, expected a floating dtype such as float32"):
        dataclasses.replace(SPEC, **{name: dtype})


@pytest.mark.parametrize(("slots", "max_len"), [(0, 4), (2, 0), (-1, 4)])
def test_an_empty_cache_is_refused(slots, max_len):
    with pytest.raises(ValueError, match=f"got slots={slots}, max_len={max_len}, expected both at least 1"):
        HybridCache.create(SPEC, slots, max_len)


def test_slots_out_of_range_are_padding():
    """-1 would wrap around to the last slot, and one past the end clamp to it."""
    cache = HybridCache.create(SPEC, 4, 9).replace(lengths=jnp.array([1, 2, 3, 4], jnp.int32))
    slots = jnp.array([2, -1, 4, 99, -4, 0], jnp.int32)
    np.testing.assert_array_equal(slot_index(slots, 4), [2, 4, 4, 4, 4, 0])
    np.testing.assert_array_equal(gather_lengths(cache, slots), [3, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(advance_lengths(cache, slots, jnp.full(6, 5)), [6, 2, 8, 4])


def test_a_draft_counts_its_root_and_at_most_its_columns():
    tokens = jnp.zeros((5, 4), jnp.int32)
    draft = Draft(tokens, jnp.array([0, 3, 9, -2, 3]), jnp.array([0, 1, 2, 3, -1]))
    np.testing.assert_array_equal(draft.num_tokens, [1, 4, 4, 1, 0])


def test_a_draft_within_a_vocabulary():
    """A chain ends before what does not exist; in a tree it is cut off with all that has it as an ancestor."""
    strange = [9, 2**31 - 1, -1, -(2**31)]
    tokens = np.array([[1, 2, 3, 4], [1, 9, 3, 4], [-7, 2, -1, 4], strange], np.int32)
    lengths, slots = np.array([2, 2**31 - 1, 3, -5], np.int32), np.arange(4, dtype=np.int32)
    chain = Draft(tokens, lengths, slots).within(9)
    np.testing.assert_array_equal(chain.counts, [2, 0, 1, 0])
    np.testing.assert_array_equal(chain.tokens, [[1, 2, 3, 4], [1, 0, 3, 4], [-7, 2, 0, 4], [9, 0, 0, 0]])
    assert chain.parents is None
    parents = np.array([[-1, 0, 2, 1], [-1, 0, 1, 0], [5, 0, 1, -9], [0, 0, 0, 0]], np.int32)
    tree = Draft(tokens, lengths, slots, parents=parents).within(9)
    np.testing.assert_array_equal(tree.counts, [2, 3, 3, 0])
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    np.testing.assert_array_equal(tree.parents, [[-1, 0, -1, 1], [-1, -1, 1, 0], [-1, 0, -1, -1], [-1] * 4])


def test_a_cache_that_awaits_its_commit_says_who_forgot_what():
    cache = HybridCache.create(SPEC, 4, 9)
    cache.require_committed("anyone")
    waiting = dataclasses.replace(cache, awaiting_commit=True)
    message = (
        "prefill got a cache that still awaits the commit of a verify pass: call "
        "update_mamba_state_after_mtp_verify with that pass's record first"
    )
    with pytest.raises(ValueError, match=message):
        waiting.require_committed("prefill")
    with pytest.raises(ValueError, match=message):  # the flag is static: seen while tracing
        jax.eval_shape(lambda cache: cache.require_committed("prefill"), waiting)
