"""The whole model's step: verify and commit against plain decoding, in bits where that is the contract."""

import collections
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ForwardMode, SpeculativeMode

from .tiny import CONFIGS, DENSE, random_params

SNAPSHOT, REPLAY = CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY
T, SLOTS, MAX_LEN = 5, 6, 48
STREAM = 11  # tokens that each request decodes
OWNED = np.array([3, 0, 5, 2], np.int32)
PROMPT = np.array([4, 7, 1, 6], np.int32)
ROWS = np.arange(len(OWNED))

TOKENS = np.random.default_rng(0).integers(0, DENSE.vocab_size, (len(OWNED), PROMPT.max() + STREAM)).astype(np.int32)


# For what is not a matter of bits: the optimiser takes most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnames=("model", "mode"), compiler_options=QUICKLY)
def prefill(model, params, tokens, cache, slots, num_tokens, mode=ForwardMode.EXTEND):
    return model.prefill(params, tokens, cache, slots=slots, num_tokens=num_tokens, mode=mode)


@functools.partial(jax.jit, static_argnames="model", compiler_options=QUICKLY)
def verify(model, params, draft, cache):
    return model.verify(params, draft, cache)


TRACES = collections.Counter()


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def step(model, params, draft, cache, steps):
    """Verify and commit; every test of one model shares one trace of it."""
    TRACES[model] += 1
    output = model.verify(params, draft, cache)
    cache = model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, steps)
    return output.logits, cache


def read_prompts(model, params):
    """Logits after each of four prompts, read in windows of T, and the cache, whose slots held others' NaN keys."""
    cache = model.init_cache(SLOTS, MAX_LEN)
    cache = dataclasses.replace(cache, kv=jax.tree.map(lambda buffer: jnp.full_like(buffer, jnp.nan), cache.kv))
    last = np.zeros((len(OWNED), model.vocab_size), np.float32)
    for start in range(0, PROMPT.max(), T):
        counts = np.clip(PROMPT - start, 0, T).astype(np.int32)
        slots = np.where(counts > 0, OWNED, -1).astype(np.int32)
        draft = Draft(*(jnp.asarray(leaf) for leaf in (TOKENS[:, start : start + T], counts - 1, slots)))
        logits, cache = step(model, params, draft, cache, jnp.asarray(counts - 1))
        last = np.where((counts > 0)[:, None], np.asarray(logits)[ROWS, counts - 1], last)
    return last, cache


def admitted(model, params) -> HybridCache:
    return read_prompts(model, params)[1]


def window(done, counts, seed) -> Draft:
    """Each request's next `counts` tokens, then wrong ones up to T; -1 rows where a request is done."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, DENSE.vocab_size, (len(OWNED), T)).astype(np.int32)
    for b in ROWS:
        start = PROMPT[b] + done[b]
        tokens[b, : counts[b]] = TOKENS[b, start : start + counts[b]]
    return Draft(jnp.asarray(tokens), jnp.asarray(counts - 1, jnp.int32), jnp.asarray(OWNED))


def run(model, params, plan, drafted=None):
    """Steps through the streams, `plan[s, b]` accepted tokens at step s; returns `[b][token]` logits and the cache."""
    cache, done = admitted(model, params), np.zeros(len(OWNED), np.int32)
    logits = [[] for _ in OWNED]
    for s, accepted in enumerate(plan):
        draft = window(done, accepted, seed=s)
        if drafted is not None:  # tokens past the accepted ones are wrong drafts rather than none
            draft = draft.replace(counts=jnp.maximum(draft.counts, drafted[s]))
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


@pytest.mark.parametrize(("config", "strategy"), [("dense", SNAPSHOT), ("dense", REPLAY), ("moe", SNAPSHOT)])
def test_speculating_has_the_bits_of_plain_decoding_in_the_same_step(config, strategy):
    model = HybridModel.create(CONFIGS[config], strategy=strategy)
    params = random_params(model)
    plain_logits, plain = run(model, params, PLAIN)
    logits, cache = run(model, params, SPECULATIVE, DRAFTED)
    assert np.isfinite(logits).all()
    assert_same_bits(logits, plain_logits, "logits")
    assert_same_bits(cache.mamba.ssm, plain.mamba.ssm, "ssm")
    assert_same_bits(cache.mamba.conv, plain.mamba.conv, "conv")
    np.testing.assert_array_equal(cache.lengths, plain.lengths)
    for ours, theirs in zip(jax.tree.leaves(committed_kv(cache)), jax.tree.leaves(committed_kv(plain)), strict=True):
        assert_same_bits(ours, theirs, "keys and values")
    assert TRACES[model] == 1, "lengths, padding and acceptance are arrays: nothing is traced again for them"


@pytest.mark.parametrize("speculative_mode", list(SpeculativeMode))
def test_a_verify_that_is_never_committed_changes_nothing(speculative_mode):
    model = HybridModel.create(DENSE, speculative_mode=speculative_mode)
    params = random_params(model)
    before = admitted(HybridModel.create(DENSE), params)
    draft = window(0 * PROMPT, np.array([5, 3, 1, 4], np.int32), seed=0)
    output = verify(model, params, draft.replace(slots=jnp.array([3, -1, 5, 2])), before)
    assert output.cache.awaiting_commit
    assert_same_bits(output.cache.mamba.ssm, before.mamba.ssm, "ssm")
    assert_same_bits(output.cache.mamba.conv, before.mamba.conv, "conv")
    np.testing.assert_array_equal(output.cache.lengths, before.lengths)
    # Keys and values are written behind the committed ones, in the rows' own slots and nowhere else.
    behind = np.arange(MAX_LEN) - np.asarray(before.lengths)[:, None]
    written = np.zeros((SLOTS, MAX_LEN), bool)
    for slot, count in ((3, 5), (5, 1), (2, 4)):
        written[slot] = (behind[slot] >= 0) & (behind[slot] < count)
    for old, new in zip(jax.tree.leaves(before.kv), jax.tree.leaves(output.cache.kv), strict=True):
        changed = (np.asarray(old).view(np.uint32) != np.asarray(new).view(np.uint32)).any((2, 3))
        np.testing.assert_array_equal(changed, written)


def test_other_programs_agree_to_rounding():
    """Decoding with T = 1, and verifying in the chunked form, against the step of T columns."""
    model = HybridModel.create(DENSE)
    params = random_params(model)
    expected_logits, expected = run(model, params, SPECULATIVE, DRAFTED)

    one_by_one = admitted(model, params)
    logits = []
    chex.clear_trace_counter()
    decode = jax.jit(chex.assert_max_traces(model.decode, n=1), donate_argnums=2, compiler_options=QUICKLY)
    for t in range(STREAM):
        output = decode(params, TOKENS[ROWS, PROMPT + t], one_by_one, slots=OWNED)
        one_by_one = output.cache
        logits.append(output.logits)
    chunked = HybridModel.create(DENSE, speculative_mode=SpeculativeMode.PREFILL)
    chunked_logits, chunked_cache = run(chunked, params, SPECULATIVE, DRAFTED)
    for actual_logits, cache in ((np.stack(logits, 1), one_by_one), (chunked_logits, chunked_cache)):
        np.testing.assert_allclose(actual_logits, expected_logits, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(cache.mamba.ssm, expected.mamba.ssm, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(cache.mamba.conv, expected.mamba.conv, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(cache.lengths, expected.lengths)


@pytest.mark.parametrize(
    "policy",
    [DTypePolicy.bfloat16(), dataclasses.replace(DTypePolicy.float16(), ssm=jnp.float16)],
    ids=["bf16", "fp16"],
)
def test_16_bit_policies(policy):
    """The same bits, speculating or not; and as near to float32 with the same weights as their roundings allow."""
    model, exact = HybridModel.create(DENSE, policy), HybridModel.create(DENSE)
    params = random_params(model)
    logits, cache = run(model, params, SPECULATIVE, DRAFTED)
    assert logits.dtype == np.float32
    stored = [(cache.mamba.ssm, policy.ssm), (cache.mamba.conv, policy.conv), (cache.kv.keys[0], policy.kv)]
    assert all(array.dtype == dtype for array, dtype in stored)

    plain_logits, plain = run(model, params, PLAIN)
    assert_same_bits(logits, plain_logits, "logits")
    assert_same_bits(cache.mamba.ssm, plain.mamba.ssm, "ssm")
    assert_same_bits(cache.mamba.conv, plain.mamba.conv, "conv")

    widened = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float32)), params)
    expected, _ = run(exact, widened, SPECULATIVE, DRAFTED)
    eps = float(jnp.finfo(policy.activations).eps)
    scale = np.sqrt(np.mean(np.square(expected)))
    error = (logits - expected) / scale
    # About 16 roundings a layer, independent of each other: their sum grows with the root of their number.
    allowed = eps * np.sqrt(16 * len(DENSE.layer_types))
    spread = np.sqrt(np.mean(np.square(error)))
    assert eps / 4 < spread < allowed, "not even rounded, or more than rounded"
    assert np.abs(error).max() < 8 * allowed


def test_chunked_prompts_and_idle_passes():
    """Prompts in chunks, the last of a single token, against windows of accepted ones; an IDLE pass changes nothing."""
    model = HybridModel.create(DENSE)
    params = random_params(model)
    expected_logits, expected = read_prompts(model, params)
    cache, last = model.init_cache(SLOTS, MAX_LEN), 0 * expected_logits
    for start, size in ((0, 6), (6, 1)):
        counts = np.clip(PROMPT - start, 0, size).astype(np.int32)
        output = prefill(model, params, TOKENS[:, start : start + size], cache, OWNED, counts)
        cache, last = output.cache, np.where((counts > 0)[:, None], output.logits, last)
    np.testing.assert_allclose(last, expected_logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(cache.mamba.ssm, expected.mamba.ssm, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cache.mamba.conv, expected.mamba.conv, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cache.lengths, expected.lengths)

    idle = prefill(model, params, TOKENS[:, :1], cache, OWNED, 0 * PROMPT + 1, mode=ForwardMode.IDLE)
    jax.tree.map(lambda new, old: assert_same_bits(new, old, "idle"), idle.cache, cache)


def test_hidden_layers_are_the_outputs_of_those_layers():
    """Asked for in any order; the last one, normed and projected, gives the logits."""
    model = HybridModel.create(DENSE, hidden_layers=(2, 0))
    params = random_params(model)
    draft = window(0 * PROMPT, np.full(len(OWNED), T), seed=0)
    output = verify(model, params, draft, model.init_cache(SLOTS, MAX_LEN))
    assert [leaf.shape for leaf in output.hidden] == [(len(OWNED), T, DENSE.hidden_size)] * 2
    lm = nnx.merge(model.graphdef, params)
    np.testing.assert_allclose(lm.logits(lm.norm(output.hidden[0])), output.logits, rtol=1e-6, atol=1e-6)
    assert np.abs(output.hidden[0] - output.hidden[1]).max() > 0.1
