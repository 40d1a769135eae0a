"""The ring by itself: what was accepted is read back in its order, while no input moves."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ring import Ring, accept_path, extend, must_fold, read_history, rows_of, write_tokens

S, B, T, Q = 5, 3, 4, 11
EVERY_SLOT = np.arange(S, dtype=np.int32)


@jax.jit
def step(ring, slots, tags, path, accepted):
    """One pass and its commit."""
    fold = must_fold(rows_of(ring.counts, slots), T, T, Q)
    written = write_tokens(ring, 0, slots, {"tag": tags})
    ordered = accept_path(written, slots, path)
    return written, ordered, extend(ordered, slots, fold, accepted), fold


@jax.jit
def histories(ring):
    return read_history(ring, 0, EVERY_SLOT)["tag"]


def empty():
    return jax.tree.map(np.asarray, Ring.empty({"tag": jnp.full((1, S, Q), jnp.nan)}))


rows = st.permutations([*range(S), -1, S]).map(lambda slots: np.array(slots[:B], np.int32))
nodes = st.lists(st.sets(st.integers(0, T - 1)).map(sorted), min_size=B, max_size=B)


@settings(max_examples=40)
@given(passes=st.lists(st.tuples(rows, nodes), max_size=12))
def test_what_was_accepted_is_read_back_in_order(passes):
    ring, expected = empty(), [[] for _ in range(S)]
    for number, (slots, paths) in enumerate(passes):
        tags = (100 * number + 10 * np.arange(B)[:, None] + np.arange(T)).astype(np.float32)
        path = np.array([[*nodes, *[-1] * T][:T] for nodes in paths], np.int32)
        written, ordered, ring, fold = step(ring, slots, tags, path, (path >= 0).sum(axis=1).astype(np.int32))
        np.testing.assert_array_equal(ordered.inputs["tag"], written.inputs["tag"])
        for b, slot in enumerate(slots):
            if 0 <= slot < S:
                expected[slot] = ([] if fold[b] else expected[slot]) + [tags[b, node] for node in paths[b]]
        np.testing.assert_array_equal(ring.counts, [len(history) for history in expected])
        for found, history in zip(np.asarray(histories(ring)), expected, strict=True):
            np.testing.assert_array_equal(found[: len(history)], history)
        np.testing.assert_array_equal(np.sort(ring.order, axis=1), np.tile(np.arange(Q), (S, 1)))


anything = st.lists(st.lists(st.integers(-2, T + 1), min_size=T, max_size=T), min_size=B, max_size=B)


@settings(max_examples=40)
@given(slots=rows, path=anything, start=st.integers(0, Q - 1), count=st.integers(0, Q - T), seed=st.integers(0, 99))
def test_whatever_the_path_only_the_window_is_permuted(slots, path, start, count, seed):
    rng, before = np.random.default_rng(seed), empty()
    before = before._replace(
        starts=np.full(S, start, np.int32),
        counts=np.full(S, count, np.int32),
        order=rng.permuted(before.order, axis=1),
    )
    _, after, _, _ = step(before, slots, np.zeros((B, T), np.float32), np.array(path, np.int32), np.zeros(B, np.int32))
    turned = [np.roll(ring.order, -start, axis=1) for ring in (before, after)]
    window = np.arange(count, count + T)
    for slot in range(S):
        old, new = (order[slot] for order in turned)
        np.testing.assert_array_equal(np.delete(new, window), np.delete(old, window))
        assert sorted(new[window]) == sorted(old[window])
        if slot not in slots:
            np.testing.assert_array_equal(new, old)
