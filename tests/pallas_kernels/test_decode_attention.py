"""Attention of a window over buffers against a float64 softmax, and what its bits must not depend on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, dispatch
from tests.pallas_kernels.runs import jitted

S, B, T, HQ, HKV, DH, M, SCALE = 6, 4, 3, 6, 2, 5, 300, 0.4
OFFSET = 2  # nodes of the tree that earlier passes wrote
# Padding, a row that fills its slot, one in the second of three chunks, one that has nothing but its window.
SLOTS = np.array([-1, 3, 0, 5], np.int32)
COUNTS = np.array([2, 3, 1, 3], np.int32)
LENGTHS = np.array([9, M - OFFSET - 3, 150, 0], np.int32)
REAL = (np.arange(T) < COUNTS[:, None]) & (SLOTS >= 0)[:, None]
TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}


def scene(tree, dtype="float32"):
    """Arguments, with NaN in every position that no row of the pass may look at."""
    rng = np.random.default_rng(0)
    buffers = rng.normal(size=(2, S, M, HKV, DH))
    kept = np.zeros((S, M), bool)
    for slot, end in zip(SLOTS, LENGTHS + OFFSET * tree + COUNTS, strict=True):
        if slot >= 0:
            kept[slot, :end] = True
    buffers[:, ~kept] = np.nan
    query = rng.normal(size=(B, T, HQ, DH))
    ancestors = rng.random((B, T, OFFSET + T)) < 0.5 if tree else None
    arrays = (jnp.asarray(leaf, dtype) for leaf in (query, *buffers))
    return (*arrays, SLOTS, LENGTHS, COUNTS), {} if ancestors is None else {"ancestors": ancestors}


def attend(run, arguments, options, **static):
    return np.asarray(jitted(decode_attention, run, donate=(), scale=SCALE, **static)(*arguments, **options))


def expected(arguments, ancestors=None, since=None):
    """`[B, T, Hq, Dh]` in float64, zero where a token is not real."""
    query, keys, values = (np.asarray(leaf, np.float64) for leaf in arguments[:3])
    out = np.zeros(query.shape)
    for b, t in np.argwhere(REAL):
        seen = np.arange(M) < LENGTHS[b] + (t + 1) * (ancestors is None)
        if ancestors is not None:
            nodes = np.flatnonzero(ancestors[b, t]) + LENGTHS[b]
            seen[nodes[nodes < LENGTHS[b] + OFFSET + COUNTS[b]]] = True
        if since is not None:
            seen[: max(since[b, t], 0)] = False
        for h in range(HQ):
            k, v = (buffer[SLOTS[b], seen, h // (HQ // HKV)] for buffer in (keys, values))
            scores = k @ query[b, t, h] * SCALE
            weights = np.exp(scores - scores.max(initial=-np.inf))
            out[b, t, h] = weights @ v / max(weights.sum(), 1e-300)
    return out


@pytest.mark.parametrize(
    ("run", "dtype", "tree"),
    [
        ("xla", "float32", False),
        ("xla", "float32", True),
        ("xla", "bfloat16", False),
        ("xla-off-cpu", "float16", True),
        ("triton", "float32", False),
        ("triton", "float32", True),
        ("triton", "bfloat16", True),
        ("triton", "float16", False),
    ],
)
def test_against_float64(run, dtype, tree):
    arguments, options = scene(tree, dtype)
    output = attend(run, arguments, options, block=64)
    assert output.dtype == jnp.dtype(dtype)
    assert np.isfinite(output).all(), "nothing behind a window is read"
    np.testing.assert_array_equal(output[0], 0, err_msg="a padding row sees nothing")
    wanted = expected(arguments, **options)
    assert np.abs(wanted[REAL]).max() > 1
    np.testing.assert_allclose(
        np.asarray(output, np.float64)[REAL], wanted[REAL], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize(("run", "tree"), [("xla", False), ("xla-off-cpu", True), ("triton", False), ("triton", True)])
def test_a_sliding_window_hides_what_is_further_back(run, tree):
    """A window of 70 positions, which the chunks and blocks are not; the short rows have all of their text in it."""
    arguments, options = scene(tree)
    options["since"] = LENGTHS[:, None] + np.arange(T, dtype=np.int32) - 69
    wanted = expected(arguments, **options)
    output = attend(run, arguments, options, block=64)
    np.testing.assert_allclose(output[REAL], wanted[REAL], rtol=1e-6, atol=1e-6)
    everything = expected(arguments, options.get("ancestors"))
    changed = np.abs(wanted - everything).max(axis=(2, 3)) > 1e-3
    np.testing.assert_array_equal(changed, REAL & (LENGTHS >= 70)[:, None])


@pytest.mark.parametrize("run", ["xla", "triton"])
def test_bits_depend_neither_on_kv_len_nor_on_other_rows(run):
    """Rows in other places beside a shorter one, looking at one chunk in place of three."""
    arguments, _ = scene(False)
    query, keys, values, *rows = arguments
    order = np.array([2, 3, 0, 2])
    moved = (query[order], keys, values, *(leaf[order] for leaf in rows))
    whole, part = (attend(run, given, {}, block=64, kv_len=n) for given, n in ((arguments, M), (moved, 155)))
    for row, before in enumerate(order[:2]):
        real = slice(0, COUNTS[before])
        np.testing.assert_array_equal(part[row, real].view(np.uint32), whole[before, real].view(np.uint32))


def test_stopping_at_the_longest_row_changes_no_bit(monkeypatch):
    arguments, options = scene(tree=True)
    short = (*arguments[:4], np.minimum(LENGTHS, 150), arguments[5])
    early = attend("xla", short, options, block=64)
    monkeypatch.setattr(dispatch, "target", lambda: dispatch.Device("gpu", "Tesla T4", (7, 5)))
    whole = attend("xla", short, options, block=64)
    np.testing.assert_array_equal(early.view(np.uint32), whole.view(np.uint32))


def test_heads_wider_than_a_tile_and_masks_wider_than_a_word():
    """T x group queries over several tiles, the last one partly empty; a tree of more than 32 nodes."""
    rng = np.random.default_rng(1)
    width, heads = 35, 4
    keys, values = (jnp.asarray(rng.normal(size=(1, 60, 1, 16)), jnp.bfloat16) for _ in range(2))
    query = jnp.asarray(rng.normal(size=(1, width, heads, 16)), jnp.bfloat16)
    rows = [jnp.array([value], jnp.int32) for value in (0, 20, width)]
    options = {"ancestors": rng.random((1, width, width)) < 0.5}
    ours, plain = (attend(run, (query, keys, values, *rows), options) for run in ("triton", "xla"))
    np.testing.assert_allclose(ours.astype(np.float32), plain.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_temporaries_are_a_block_whatever_the_buffers_are():
    def temporary(slots, max_len):
        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((B, T, HQ, DH), *[(slots, max_len, HKV, DH)] * 2)]
        rows = [jax.ShapeDtypeStruct((B,), jnp.int32)] * 3
        lowered = jax.jit(lambda *args: decode_attention(*args, scale=SCALE, block=64)).lower(*arrays, *rows)
        compiled = lowered.compile({"xla_backend_optimization_level": 0})
        assert not re.findall(rf"= \w+\[{slots},{max_len}[,\]]\S* copy\(", compiled.as_text())
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(7, 130) == temporary(900, 7000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": jnp.zeros((S, M, HKV, DH + 1))}, r"keys has shape .*, expected \[S, M, Hkv, 5\]"),
        ({"values": jnp.zeros((S, M - 1, HKV, DH))}, r"values has shape .*, expected \[6, 300, 2, 5\]"),
        ({"values": jnp.zeros((S, M, HKV, DH), jnp.bfloat16)}, "values is bfloat16, expected float32 as keys"),
        ({"query": jnp.zeros((B, T, 5, DH))}, "query has 5 heads, expected a multiple of the 2 of keys"),
        ({"query": jnp.zeros((B, T, HQ, DH), jnp.int32)}, "query is int32, expected float32, bfloat16 or float16"),
        ({"slots": np.zeros(B + 1, np.int32)}, r"slots has shape \[5\], expected \[4\]"),
        ({"lengths": np.zeros(B, np.float32)}, "lengths is float32, expected int32"),
        ({"ancestors": np.ones((B, T, T - 1), bool)}, "ancestors is bool with 2 columns, expected bool with"),
        ({"ancestors": np.ones((B, T, T), np.int32)}, "ancestors is int32 with 3 columns, expected bool"),
        ({"since": np.zeros((B, T + 1), np.int32)}, r"since has shape \[4, 4\], expected \[4, 3\]"),
        ({"kv_len": M + 1}, r"kv_len is 301, expected 1\.\.300"),
        ({"block": 0}, "block is 0, expected at least 1"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(changes, message):
    names = ("query", "keys", "values", "slots", "lengths", "num_tokens")
    given = dict(zip(names, scene(False)[0], strict=True)) | changes
    with pytest.raises(ValueError, match=f"decode_attention: {message}"):
        decode_attention(**given, scale=SCALE)
