"""Full attention over the cache against a float64 softmax, and the bits that must not depend on the surroundings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.cache.pools import HybridCache, KVCache, PoolSpec
from mamba_spec_jax.modes import ForwardMode

from . import oracle
from .recurrent import assert_same_bits

SLOTS, MAX_LEN, HQ, HKV, DH, T = 5, 44, 6, 2, 6, 5
SLOT = np.array([3, -1, 0, 4], np.int32)
LENGTHS = np.array([7, 0, 20, 0], np.int32)
COUNTS = np.array([5, 0, 2, 4], np.int32)


def attend(attention, kv_len, batch, inputs, kv):
    slots, lengths, counts = batch
    positions = lengths[:, None] + jnp.arange(inputs.query.shape[1], dtype=jnp.int32)
    batch = ForwardBatch(slots, lengths, counts, positions, ForwardMode.TARGET_VERIFY, kv_len)
    return attention.forward(0, inputs, kv, batch)


run = jax.jit(attend, static_argnames=("attention", "kv_len"))


def scene(seed=0, dtype="float32"):
    """Inputs, and buffers of committed keys with NaN in every row that nobody may read."""
    rng = np.random.default_rng(seed)
    inputs = [jnp.asarray(rng.normal(size=(len(SLOT), T, heads, DH)), dtype) for heads in (HQ, HKV, HKV)]
    buffers = rng.normal(size=(2, SLOTS, MAX_LEN, HKV, DH))
    committed = np.zeros((SLOTS, MAX_LEN), bool)
    for slot, length in zip(SLOT, LENGTHS, strict=True):
        if slot >= 0:
            committed[slot, :length] = True
    buffers[:, ~committed] = np.nan
    keys, values = (jnp.asarray(buffer, dtype) for buffer in buffers)
    return AttentionInputs(*inputs), KVCache((keys,), (values,))


def expected_row(row, inputs, kv, scale):
    def whole(buffer, window):
        past = np.asarray(buffer[0][SLOT[row], : LENGTHS[row]])
        return np.concatenate([past, np.asarray(window[row, : COUNTS[row]])]).astype(np.float64)

    query = np.asarray(inputs.query[row, : COUNTS[row]], np.float64)
    return oracle.attention(query, whole(kv.keys, inputs.key), whole(kv.values, inputs.value), scale)


@pytest.mark.parametrize("block", [1, 8, 256])
def test_against_float64(block):
    inputs, kv = scene()
    output, after = run(FullAttention(0.3, block), 30, (SLOT, LENGTHS, COUNTS), inputs, kv)
    for row in np.flatnonzero(SLOT >= 0):
        expected = expected_row(row, inputs, kv, 0.3)
        np.testing.assert_allclose(output[row, : COUNTS[row]], expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(output[1], 0, err_msg="a padding row sees nothing")
    for buffer, old, window in zip(
        after.keys + after.values, kv.keys + kv.values, (inputs.key, inputs.value), strict=True
    ):
        wanted = np.array(old)
        for row, slot in enumerate(SLOT):
            if slot >= 0:
                wanted[slot, LENGTHS[row] : LENGTHS[row] + COUNTS[row]] = window[row, : COUNTS[row]]
        assert_same_bits(buffer, wanted, "only real tokens are written, at their positions")


@pytest.mark.parametrize("block", [8, 256])
def test_the_static_length_changes_no_bit(block):
    """Shorter than a block, a multiple of it or not: the longest row ends at 22."""
    inputs, kv = scene()
    attention = FullAttention(0.3, block)
    whole, _ = run(attention, MAX_LEN, (SLOT, LENGTHS, COUNTS), inputs, kv)
    real = np.arange(T) < COUNTS[:, None]
    for kv_len in (22, 40):
        output, _ = run(attention, kv_len, (SLOT, LENGTHS, COUNTS), inputs, kv)
        assert_same_bits(np.asarray(output)[real], np.asarray(whole)[real], f"kv_len {kv_len}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_place_in_its_window_changes_no_bit(dtype):
    """Whole windows, and then each of their tokens alone in column 0 with garbage behind it, rows the other way."""
    inputs, kv = scene(dtype=dtype)
    attention = FullAttention(0.3, block=8)
    whole, _ = run(attention, MAX_LEN, (SLOT, LENGTHS, COUNTS), inputs, kv)
    turned = slice(None, None, -1)
    for t in range(T):
        alive = (t < COUNTS).astype(np.int32)

        def alone(leaf, t=t):
            return jnp.concatenate([leaf[:, t : t + 1], jnp.full_like(leaf[:, 1:], 1e3)], axis=1)[turned]

        batch = (SLOT[turned], (LENGTHS + t)[turned], alive[turned])
        output, kv = run(attention, MAX_LEN, batch, jax.tree.map(alone, inputs), kv)
        rows = np.flatnonzero(alive)
        assert_same_bits(np.asarray(output)[turned][rows, 0], np.asarray(whole)[rows, t], f"token {t}")


def test_float16_is_near_float64():
    inputs, kv = scene(dtype="float16")
    output, _ = run(FullAttention(0.3), MAX_LEN, (SLOT, LENGTHS, COUNTS), inputs, kv)
    assert output.dtype == jnp.float16
    for row in np.flatnonzero(SLOT >= 0):
        expected = expected_row(row, inputs, kv, 0.3)
        np.testing.assert_allclose(output[row, : COUNTS[row]], expected, rtol=4e-3, atol=4e-3)


def test_a_forward_batch_counts_real_tokens_only():
    cache = HybridCache.create(PoolSpec(1, 1, 1, 1, 2, 1), slots=3, max_len=8)
    cache = cache.replace(lengths=jnp.array([4, 5, 6], jnp.int32))
    slots, counts = jnp.array([2, -1, 3, 0]), jnp.array([9, 1, 1, -2])
    batch = ForwardBatch.create(ForwardMode.EXTEND, cache, slots, counts, width=2)
    np.testing.assert_array_equal(batch.lengths, [6, 0, 0, 4])
    np.testing.assert_array_equal(batch.num_tokens, [2, 0, 0, 0])
    np.testing.assert_array_equal(batch.positions, [[6, 7], [0, 1], [0, 1], [4, 5]])
    np.testing.assert_array_equal(batch.is_real, [[True, True], [False] * 2, [False] * 2, [False] * 2])
    assert batch.kv_len == 8
    for kv_len in (0, 9):
        with pytest.raises(ValueError, match=rf"kv_len is {kv_len}, expected 1\.\.8 \(the cache's max_len\)"):
            ForwardBatch.create(ForwardMode.EXTEND, cache, slots, counts, 2, kv_len)
