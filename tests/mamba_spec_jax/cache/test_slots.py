"""Who owns which slot, what clearing one touches, and where a row crosses a tracking boundary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.cache.pools import HybridCache, PoolSpec, RingSpec
from mamba_spec_jax.cache.slots import SlotAllocator, reset_slots, tracking_steps
from mamba_spec_jax.modes import ReplayRing


def test_the_allocator_hands_out_each_slot_once():
    allocator = SlotAllocator(3)
    assert (allocator.allocate(2), allocator.num_free) == ([0, 1], 1)
    with pytest.raises(ValueError, match="asked for 2 slots, 1 of 3 are free: free some first"):
        allocator.allocate(2)
    assert allocator.allocate(0) == []
    assert (allocator.allocate(1), allocator.num_free) == ([2], 0)
    allocator.free([1, 0])
    assert allocator.num_free == 2
    assert sorted(allocator.allocate(2)) == [0, 1]


@pytest.mark.parametrize(
    ("slots", "unknown"), [([0, 2], r"\[2\]"), ([0, 0], r"\[\]"), ([-1], r"\[-1\]"), ([0, 7], r"\[7\]")]
)
def test_freeing_what_is_not_ones_own_frees_nothing(slots, unknown):
    allocator = SlotAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=rf"cannot free slots .*each must be in use and named once, .*{unknown}"):
        allocator.free(slots)
    assert allocator.num_free == 2
    allocator.free([0, 1])


def test_allocator_arguments():
    with pytest.raises(ValueError, match="SlotAllocator got num_slots=0, expected at least 1"):
        SlotAllocator(0)
    with pytest.raises(ValueError, match="asked for -1 slots"):
        SlotAllocator(1).allocate(-1)


@settings(max_examples=50)
@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=30))
def test_any_history_of_the_allocator(num_slots, operations):
    """Against a plain set: nobody ever shares a slot, and none is lost."""
    allocator, owned = SlotAllocator(num_slots), []
    for take, count in operations:
        if take and count <= allocator.num_free:
            taken = allocator.allocate(count)
            assert len(taken) == count
            assert not set(taken) & set(owned)
            assert all(0 <= slot < num_slots for slot in taken)
            owned += taken
        elif not take:
            allocator.free(owned[:count])
            owned = owned[count:]
        assert allocator.num_free == num_slots - len(owned)


RING = RingSpec(ReplayRing(length=8, window=4), (("x", (6,), np.dtype(np.float32)),))
SPEC = PoolSpec(2, 2, 3, 4, 3, 5, attention_layers=1, kv_heads=1, kv_head_dim=2, ring=RING)


def test_reset_clears_its_slots_and_no_byte_else():
    cache = jax.tree.map(lambda leaf: jnp.full_like(leaf, 7 if leaf.dtype == jnp.int32 else jnp.nan),
                         HybridCache.create(SPEC, 5, 4))  # fmt: skip
    after = jax.jit(reset_slots)(cache, jnp.array([3, -1, 0, 5, 99], jnp.int32))
    cleared = np.isin(np.arange(5), [0, 3])
    for pool in (after.mamba.ssm, after.mamba.conv):
        np.testing.assert_array_equal(np.asarray(pool)[:, cleared], 0)
        assert np.isnan(np.asarray(pool)[:, ~cleared]).all()
    np.testing.assert_array_equal(after.lengths, np.where(cleared, 0, 7))
    np.testing.assert_array_equal(after.mamba.ring.counts, np.where(cleared, 0, 7))
    np.testing.assert_array_equal(after.mamba.ring.order, np.where(cleared[:, None], np.arange(8), 7))
    assert all(np.isnan(np.asarray(leaf)).all() for leaf in jax.tree.leaves(after.kv)), "stale keys are never read"


def test_reset_refuses_a_cache_that_awaits_its_commit():
    waiting = dataclasses.replace(HybridCache.create(SPEC, 5, 4), awaiting_commit=True)
    with pytest.raises(ValueError, match="reset_slots got a cache that still awaits the commit of a verify pass"):
        jax.eval_shape(reset_slots, waiting, jnp.zeros(1, jnp.int32))


def published_at(length, accepted, interval):
    """The node after which a multiple of `interval` tokens is committed, the last such node, by walking there."""
    nodes = [node for node in range(accepted) if (length + node + 1) % interval == 0]
    return nodes[-1] if nodes else -1


@settings(max_examples=100)
@given(st.integers(1, 70), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 17)), min_size=4, max_size=4))
def test_tracking_steps(interval, rows):
    lengths, accepted = (jnp.array(column, jnp.int32) for column in zip(*rows, strict=True))
    expected = [published_at(length, count, interval) for length, count in rows]
    np.testing.assert_array_equal(tracking_steps(lengths, accepted, interval), expected)


def test_tracking_at_the_exact_boundary():
    """A row that ends on a boundary publishes it; one that begins there does not publish it again."""
    lengths, accepted = jnp.array([5, 8, 8, 7, 4, 8]), jnp.array([3, 1, 8, 1, 3, 0])
    np.testing.assert_array_equal(tracking_steps(lengths, accepted, 8), [2, -1, 7, 0, -1, -1])


def test_tracking_on_the_path_of_a_tree():
    path = jnp.array([[0, 2, 5], [0, 1, -1], [0, 3, 4], [-1, -1, -1]])
    lengths, accepted = jnp.array([6, 3, 6, 8]), jnp.array([3, 2, 2, 0])
    np.testing.assert_array_equal(tracking_steps(lengths, accepted, 8, path), [2, -1, 3, -1])


def test_tracking_interval():
    with pytest.raises(ValueError, match="tracking_steps got interval=0, expected at least 1"):
        tracking_steps(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), 0)
