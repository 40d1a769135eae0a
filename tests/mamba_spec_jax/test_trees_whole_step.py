"""A whole tiny model over draft trees: each node, and what follows an accepted path, against plain decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.cache.pools import HybridCache, MambaPool
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, SpeculativeMode

from .tiny import CONFIGS, DENSE, random_params
from .trees import path, trees

T, SLOTS, MAX_LEN = 6, 5, 24
OWNED = np.array([3, 0, 4], np.int32)
PROMPT = np.array([4, 7, 1], np.int32)
B = len(OWNED)
# Nothing here is compared in bits, and the optimiser takes most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}

MOE = dataclasses.replace(CONFIGS["moe"], layer_types=("attention", "mamba"))  # rotary positions, grouped queries
# The model that verifies the tree, and the one that decodes its paths.
CASES = {
    "dense": (HybridModel.create(DENSE), HybridModel.create(DENSE)),
    "chunked": (HybridModel.create(DENSE, speculative_mode=SpeculativeMode.PREFILL), HybridModel.create(DENSE)),
    "rotary, replayed": (HybridModel.create(MOE, strategy=CommitStrategy.REPLAY), HybridModel.create(MOE)),
}


@functools.partial(jax.jit, static_argnames="model", compiler_options=QUICKLY)
def step(model, params, draft, cache, node):
    output = model.verify(params, draft, cache)
    return output.logits, model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, node)


def _poisoned(leaf):
    """NaNs; and a ring without history as it is."""
    return np.array(leaf) if leaf.dtype == np.int32 else np.full(leaf.shape, np.nan, leaf.dtype)


@functools.cache
def occupied(model) -> HybridCache:
    """Three slots as if prompts had been read into them; all that belongs to nobody is NaN."""
    rng = np.random.default_rng(0)
    empty = model.init_cache(SLOTS, MAX_LEN)
    mamba, kv = jax.tree.map(_poisoned, (empty.mamba, empty.kv))
    lengths = np.zeros(SLOTS, np.int32)
    lengths[OWNED] = PROMPT
    for pool in (mamba.ssm, mamba.conv):
        pool[:, OWNED] = rng.normal(size=pool[:, OWNED].shape)
    for buffer in jax.tree.leaves(kv):
        for slot in OWNED:
            buffer[slot, : lengths[slot]] = rng.normal(size=buffer[slot, : lengths[slot]].shape)
    return dataclasses.replace(empty, mamba=mamba, kv=kv, lengths=lengths)


def rows_of(cache: HybridCache, slots) -> HybridCache:
    """A cache in which slot i holds what `slots[i]` of the other one holds."""
    mamba = MambaPool(cache.mamba.ssm[:, slots], cache.mamba.conv[:, slots])  # no ring has a history yet
    kv = jax.tree.map(lambda buffer: buffer[slots], cache.kv)
    return HybridCache(mamba, kv, cache.lengths[slots], cache.max_len)


def close(actual, expected, name):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", list(CASES))
@settings(max_examples=5)
@given(parents=trees(B, T), num_tokens=st.tuples(st.just(T), st.integers(1, T), st.integers(0, T)), seed=st.integers(0))
def test_every_node_and_what_follows_it(case, parents, num_tokens, seed):
    (model, plainly), rng, num_tokens = CASES[case], np.random.default_rng(seed), np.array(num_tokens)
    params, before = random_params(model), occupied(model)
    tokens = rng.integers(0, model.vocab_size, (B, T)).astype(np.int32)
    slots = np.where(num_tokens > 0, OWNED, -1).astype(np.int32)
    real = np.arange(T) < num_tokens[:, None]
    node = np.array([rng.integers(0, max(count, 1)) for count in num_tokens])
    node[0] = T - 1  # its path is seldom T nodes long
    draft = Draft(tokens, (num_tokens - 1).astype(np.int32), slots, parents=parents)
    logits, after = step(model, params, draft, before, np.where(num_tokens > 0, node, -1).astype(np.int32))

    # Plainly: a row of its own for every node, which reads the path to it and nothing else.
    paths = [path(parents[b], t) for b in range(B) for t in range(T)]
    row, last = np.repeat(np.arange(B), T), np.array([len(nodes) - 1 for nodes in paths], np.int32)
    chain = np.array([[tokens[b, t] for t in [*nodes, *[0] * T][:T]] for b, nodes in zip(row, paths, strict=True)])
    entries = np.arange(B * T, dtype=np.int32)
    plain = Draft(chain.astype(np.int32), last, entries)
    plain_logits, plain_after = step(plainly, params, plain, rows_of(before, OWNED[row]), last)
    expected = np.asarray(plain_logits)[entries, last].reshape(B, T, -1)
    close(np.asarray(logits)[real], expected[real], "logits")

    kept = np.flatnonzero(num_tokens > 0)
    there, here = (kept * T + node[kept]), OWNED[kept]
    depth = last[there] + 1
    gained = np.zeros(SLOTS, np.int32)
    gained[here] = depth
    np.testing.assert_array_equal(after.lengths, before.lengths + gained)
    held = model.materialize(after, jnp.asarray(here)).mamba
    others = np.setdiff1d(np.arange(SLOTS), here)
    for name in ("ssm", "conv"):
        close(getattr(held, name)[:, here], getattr(plain_after.mamba, name)[:, there], name)
        np.testing.assert_array_equal(getattr(held, name)[:, others], getattr(before.mamba, name)[:, others])
    for new, old, alone in zip(*map(jax.tree.leaves, (after.kv, before.kv, plain_after.kv)), strict=True):
        for slot, entry, count in zip(here, there, np.asarray(after.lengths)[here], strict=True):
            close(new[slot, :count], alone[entry, :count], "keys and values of the accepted path")
        np.testing.assert_array_equal(new[others], old[others], err_msg="nobody else's keys and values")

    # And on from there: the next pass, a chain of all T columns, reads the compacted rows.
    following = rng.integers(0, model.vocab_size, (B, T)).astype(np.int32)
    everything = np.full(B, T - 1, np.int32)
    next_logits, _ = step(model, params, Draft(following, everything, slots), after, everything)
    plain_next = Draft(following[row], everything[row], entries)
    plain_next_logits, _ = step(plainly, params, plain_next, plain_after, everything[row])
    close(np.asarray(next_logits)[kept], np.asarray(plain_next_logits)[there], "logits of the next pass")


def test_attention_alone_commits_a_tree_under_replay():
    config = dataclasses.replace(DENSE, layer_types=("attention", "attention"))
    model = HybridModel.create(config, strategy=CommitStrategy.REPLAY)

    def commit(params, cache, draft, node):
        output = model.verify(params, draft, cache)
        cache = model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, node, draft.slots, node)
        return model.materialize(cache, draft.slots)

    cache = jax.eval_shape(lambda: model.init_cache(SLOTS, MAX_LEN))
    rows, nodes = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((B,), (B, T)))
    draft = Draft(nodes, rows, rows, parents=nodes)
    assert jax.eval_shape(commit, model.abstract_params(), cache, draft, rows) == cache
