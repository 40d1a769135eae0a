"""Trees under the recurrence: the bits of a chain where they are one, and of decoding each path where they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.cache.pools import HybridCache, MambaPool
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, SpeculativeMode

from ..trees import chains, path, trees
from .recurrent import (
    SLOTS,
    assert_same_bits,
    assert_same_pool,
    commit,
    decode_history,
    expected_pool,
    forward,
    held,
    make_backend,
    make_inputs,
    make_weights,
    occupied,
    projected,
)

T = 6
OWNED = np.array([4, 9, 0], np.int32)
LENGTHS = np.array([3, 1, 5], np.int32)
ACCEPTED = [5, 0, 3]  # nodes of a first chain
B = len(OWNED)
VERIFY = ForwardMode.TARGET_VERIFY
SNAPSHOT, REPLAY = CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY

CASES = {
    "float32": {"heads": 4, "groups": 2, "conv_width": 5, "dt_limits": (0.3, 0.9)},
    "bfloat16": {"ssm_dtype": "bfloat16", "conv_dtype": "bfloat16", "activations": "bfloat16", "conv_width": 3},
    "float16": {"ssm_dtype": "float16", "conv_dtype": "float16", "activations": "float16"},
    "mamba1": {"kind": "mamba1"},
    "decay per channel": {"kind": "gated_delta", "channel_decay": True, "heads": 2, "ssm_dtype": "bfloat16"},
}


def scene(strategy, case, verify=SpeculativeMode.DECODE):
    backend = make_backend(strategy, verify, **CASES[case])
    dtype = CASES[case].get("conv_dtype", "float32")
    weights = make_weights(backend, dtype=dtype)
    cache = occupied(backend, OWNED, LENGTHS)
    # A few tokens of a chain first, which REPLAY then has to look back to.
    before = make_inputs(backend, B, T, seed=9, dtype=dtype)
    _, cache, record = run(backend, weights, cache, before, np.full(B, T), None)
    cache = commit(backend, cache, record, jnp.asarray(ACCEPTED, jnp.int32))
    return backend, weights, cache, make_inputs(backend, B, T, seed=4, dtype=dtype)


def run(backend, weights, cache, inputs, num_tokens, parents, slots=OWNED):
    """One verify, with NaN at every node that is not real."""
    real = np.arange(T) < num_tokens[:, None]
    inputs = [
        np.where(real.reshape(1, *real.shape, *[1] * (leaf.ndim - 3)), leaf, leaf.dtype.type(np.nan)) for leaf in inputs
    ]
    rows = jnp.asarray(slots), jnp.asarray(num_tokens)
    return forward(backend, VERIFY, cache, weights, *rows, *inputs, parents=parents)


def assert_committed(backend, after, cache, nodes, targets, same=assert_same_bits):
    """`targets` are `(slot, row, node, tokens gained)`; node T is the state before the tree."""
    expected = expected_pool(held(backend, cache, OWNED), nodes, [target[:3] for target in targets])
    states = held(backend, after, OWNED)
    same(np.asarray(states.ssm), expected.ssm)
    assert_same_bits(states.conv, expected.conv, "windows hold inputs, which no form computes")
    gained = np.zeros(SLOTS, np.int32)
    for slot, _, _, count in targets:
        gained[slot] += count
    np.testing.assert_array_equal(after.lengths, cache.lengths + gained)


@functools.cache
def chain(case, num_tokens):
    """Outputs of a chain verify; states and windows `[L, B, T + 1, ...]` after each token, those before it at T."""
    backend, weights, cache, inputs = scene(SNAPSHOT, case)
    outputs, _, record = run(backend, weights, cache, inputs, np.array(num_tokens), None)
    ssm, conv = (np.asarray(pool)[:, OWNED] for pool in (cache.mamba.ssm, cache.mamba.conv))
    history = np.concatenate([conv, projected(inputs[0]).astype(conv.dtype)], axis=2)
    windows = [history[:, :, t + 1 : t + 1 + conv.shape[2]] for t in range(T)] + [conv]
    states = np.concatenate([np.asarray(record.recurrent), ssm[:, :, None]], axis=2)
    return np.asarray(outputs), MambaPool(states, np.stack(windows, axis=2))


# tests/sweeps has the other combinations.
@pytest.mark.parametrize(("strategy", "case"), [(SNAPSHOT, "float32"), (REPLAY, "bfloat16")])
def test_a_tree_that_is_a_chain_has_the_bits_of_the_chain(strategy, case):
    check_chain(strategy, case)


def check_chain(strategy, case):
    backend, weights, cache, inputs = scene(strategy, case)
    num_tokens = np.array([T, 4, 2], np.int32)
    real = np.arange(T) < num_tokens[:, None]
    expected_outputs, nodes = chain(case, tuple(num_tokens.tolist()))
    outputs, verified, record = run(backend, weights, cache, inputs, num_tokens, chains(B, T))
    assert_same_bits(np.asarray(outputs)[:, real], expected_outputs[:, real], "outputs")
    nothing = commit(backend, verified, record, jnp.full(B, -1, jnp.int32))
    assert_same_pool(held(backend, nothing, OWNED), held(backend, cache, OWNED), "with nothing accepted")
    for steps in ([5, 3, 1], [0, 0, 0], [2, -1, 5], [T, 2, -9]):
        tracked = jnp.array([1, 3, -1], jnp.int32), jnp.array([4, 3, 0], jnp.int32)
        after = commit(backend, verified, record, jnp.asarray(steps, jnp.int32), *tracked)
        live = [(OWNED[b], b, t, t + 1) for b, t in enumerate(steps) if 0 <= t < num_tokens[b]]
        assert_committed(backend, after, cache, nodes, [*live, (1, 0, 4, 0), (3, 1, 3, 0)])


def decoded_paths(backend, parents, weights, cache, inputs, case):
    """What decoding the path of every node on its own gives: outputs of the nodes, and states with their windows.

    Returns:
        outputs `[L, B, T, H, P]`, states and windows `[L, B, T + 1, ...]`, those before the tree at T.
    """
    decoder = make_backend(SNAPSHOT, **CASES[case])
    paths = [path(parents[b], t) for b in range(B) for t in range(T)]
    row, last = np.repeat(np.arange(B), T), np.array([len(nodes) - 1 for nodes in paths])
    padded = np.array([nodes + [0] * (T - len(nodes)) for nodes in paths])
    states = held(backend, cache, OWNED)
    mamba = MambaPool(states.ssm[:, OWNED[row]], states.conv[:, OWNED[row]])
    alone = HybridCache(mamba, cache.kv, jnp.zeros(B * T, jnp.int32), cache.max_len)
    follow = [leaf[:, row[:, None], padded] for leaf in inputs]
    outputs, history = decode_history(decoder, weights, alone, np.arange(B * T), follow)
    entry = np.arange(B * T)
    before = jax.tree.map(lambda leaf: leaf[:, entry, 0].reshape(-1, B, T, *leaf.shape[3:])[:, :, :1], history)
    after = jax.tree.map(lambda leaf: leaf[:, entry, last + 1].reshape(-1, B, T, *leaf.shape[3:]), history)
    pools = jax.tree.map(lambda new, old: np.concatenate([new, old], axis=2), after, before)
    return outputs[:, entry, last].reshape(-1, B, T, *outputs.shape[3:]), MambaPool(pools.ssm, pools.conv)


def check_random_tree(strategy, case, verify, parents, num_tokens, same):
    backend, weights, cache, inputs = scene(strategy, case, verify)
    expected_outputs, nodes = decoded_paths(backend, parents, weights, cache, inputs, case)
    slots = np.where(num_tokens > 0, OWNED, -1).astype(np.int32)
    outputs, verified, record = run(backend, weights, cache, inputs, num_tokens, parents, slots)
    real = np.arange(T) < num_tokens[:, None]
    same(np.asarray(outputs)[:, real], expected_outputs[:, real])
    nothing = commit(backend, verified, record, jnp.full(B, -1, jnp.int32))
    assert_committed(backend, nothing, cache, nodes, [], same)
    for t in range(-1, T):
        # Each row at another node; and another one is published to a slot that is nobody's.
        steps = (t + np.arange(B)) % (T + 1) - 1
        tracked = (steps + 3) % T
        after = commit(backend, verified, record, *(jnp.asarray(v, jnp.int32) for v in (steps, [1, 3, 5], tracked)))
        live = [
            (OWNED[b], b, steps[b], len(path(parents[b], steps[b]))) for b in range(B) if 0 <= steps[b] < num_tokens[b]
        ]
        published = [((1, 3, 5)[b], b, tracked[b], 0) for b in range(B) if tracked[b] < num_tokens[b]]
        assert_committed(backend, after, cache, nodes, live + published, same)


counts = st.lists(st.sampled_from([T, T, 4, 1, 0]), min_size=B, max_size=B).map(lambda c: np.array(c, np.int32))


@pytest.mark.parametrize(
    ("strategy", "case"),
    [(SNAPSHOT, "float16"), (REPLAY, "float32"), (REPLAY, "decay per channel"), (SNAPSHOT, "mamba1")],
)
@settings(max_examples=6)
@given(parents=trees(B, T), num_tokens=counts)
def test_every_node_has_the_bits_of_decoding_its_path(strategy, case, parents, num_tokens):
    check_random_tree(strategy, case, SpeculativeMode.DECODE, parents, num_tokens, assert_same_bits)


@pytest.mark.parametrize("strategy", [SNAPSHOT, REPLAY])
@settings(max_examples=6)
@given(parents=trees(B, T), num_tokens=counts)
def test_the_chunked_form_is_close_to_decoding_each_path(strategy, parents, num_tokens):
    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

    check_random_tree(strategy, "float32", SpeculativeMode.PREFILL, parents, num_tokens, close)
