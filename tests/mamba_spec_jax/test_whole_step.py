"""The whole model's step: verify and commit against plain decoding, in bits where that is the contract."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, ForwardMode

from .tiny import CONFIGS, DENSE, random_params

T, SLOTS, MAX_LEN = 5, 6, 48
STREAM = 11  # tokens that each request decodes
OWNED = np.array([3, 0, 5, 2], np.int32)
PROMPT = np.array([4, 7, 1, 6], np.int32)
ROWS = np.arange(len(OWNED))

TOKENS = np.random.default_rng(0).integers(0, DENSE.vocab_size, (len(OWNED), PROMPT.max() + STREAM)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="model")
def prefill(model, params, tokens, cache, slots, num_tokens):
    return model.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens)


@functools.partial(jax.jit, static_argnames=("model", "mode"))
def verify(model, params, draft, cache, mode=ForwardMode.TARGET_VERIFY):
    return model.verify(params, draft, cache, mode=mode)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def decode(model, params, tokens, cache, slots):
    return model.decode(params, tokens, cache, slots=slots)


def whole_step(model, params, draft, cache, steps):
    output = model.verify(params, draft, cache)
    cache = model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, steps)
    return output.logits, cache


def prefilled(model, params) -> HybridCache:
    """Every slot used before, then four requests admitted; keys and values still hold the last owners' NaNs."""
    cache = model.init_cache(SLOTS, MAX_LEN)
    kv = jax.tree.map(lambda buffer: jnp.full_like(buffer, jnp.nan), cache.kv)
    cache = dataclasses.replace(cache, kv=kv)
    return prefill(model, params, TOKENS[:, : PROMPT.max()], cache, OWNED, PROMPT).cache


def window(done, counts, seed) -> Draft:
    """Each request's next `counts` tokens, then wrong ones up to T; -1 rows where a request is done."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, DENSE.vocab_size, (len(OWNED), T)).astype(np.int32)
    for b in ROWS:
        start = PROMPT[b] + done[b]
        tokens[b, : counts[b]] = TOKENS[b, start : start + counts[b]]
    return Draft(jnp.asarray(tokens), jnp.asarray(counts - 1, jnp.int32), jnp.asarray(OWNED))


def run(model, params, step, plan, drafted=None):
    """Steps through the streams, `plan[s, b]` accepted tokens at step s; returns `[b][token]` logits and the cache."""
    cache, done = prefilled(model, params), np.zeros(len(OWNED), np.int32)
    logits = [[] for _ in OWNED]
    for s, accepted in enumerate(plan):
        draft = window(done, accepted, seed=s)
        if drafted is not None:  # tokens past the accepted ones are wrong drafts rather than none
            draft = draft.replace(lengths=jnp.maximum(draft.lengths, drafted[s]))
        draft = draft.replace(slots=jnp.asarray(np.where(accepted > 0, OWNED, -1), jnp.int32))
        out, cache = step(model, params, draft, cache, jnp.asarray(accepted - 1, jnp.int32))
        for b in ROWS:
            logits[b] += list(np.asarray(out)[b, : accepted[b]])
        done += accepted
    assert (done == STREAM).all()
    return np.asarray(logits), cache


PLAIN = np.ones((STREAM, len(OWNED)), np.int32)
# Ragged on purpose, with zeros (padding rows) once a stream has ended; each column sums to STREAM.
SPECULATIVE = np.array([[5, 1, 3, 2], [5, 4, 1, 5], [1, 1, 5, 4], [0, 5, 2, 0]], np.int32)
DRAFTED = np.array([[4, 3, 4, 1], [4, 4, 0, 4], [2, 0, 4, 4], [0, 4, 1, 3]], np.int32)


def assert_same_bits(actual, expected, name):
    actual, expected = np.asarray(actual), np.asarray(expected)
    integer = np.dtype(f"uint{8 * actual.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(integer), expected.view(integer), err_msg=name)


def committed_kv(cache):
    """Keys and values that a later pass may read, the rest zeroed."""
    keep = np.arange(MAX_LEN) < np.asarray(cache.lengths)[:, None]
    return jax.tree.map(lambda buffer: np.where(keep[:, :, None, None], buffer, 0), cache.kv)


@pytest.mark.parametrize("strategy", list(CommitStrategy))
@pytest.mark.parametrize("config", list(CONFIGS))
def test_speculating_has_the_bits_of_plain_decoding_in_the_same_step(config, strategy):
    model = HybridModel.create(CONFIGS[config], strategy=strategy)
    params = random_params(model)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(whole_step, n=1), static_argnames="model", donate_argnames="cache")
    plain_logits, plain = run(model, params, step, PLAIN)
    logits, cache = run(model, params, step, SPECULATIVE, DRAFTED)
    assert np.isfinite(logits).all()
    assert_same_bits(logits, plain_logits, "logits")
    assert_same_bits(cache.mamba.ssm, plain.mamba.ssm, "ssm")
    assert_same_bits(cache.mamba.conv, plain.mamba.conv, "conv")
    np.testing.assert_array_equal(cache.lengths, plain.lengths)
    for ours, theirs in zip(jax.tree.leaves(committed_kv(cache)), jax.tree.leaves(committed_kv(plain)), strict=True):
        assert_same_bits(ours, theirs, "keys and values")
