"""Acceptance on trees: walks against plain Python, chains among trees, siblings at their edges, and stops on a path."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.speculative.acceptance import accept
from mamba_spec_jax.speculative.sampling import Filters, Greedy, Purpose, Sampling, draw_keys, draw_tokens
from mamba_spec_jax.speculative.stop import StopConditions, StopReason, limit_accept

from ..trees import chains, trees

B, T, V = 4, 6, 5
SEEDS = jnp.arange(B, dtype=jnp.uint32) * 7 + 1
STARTS = jnp.arange(B, dtype=jnp.int32)[:, None] * 3

jit_accept = jax.jit(accept, static_argnames=("method", "with_logprobs"))


def run(logits, draft, method=Greedy(), temperature=1.0, top_k=0):  # noqa: B008, frozen
    steps = jnp.arange(T, dtype=jnp.int32) if draft.parents is None else Tree.create(draft.parents).depths
    draft = jax.tree.map(np.asarray, draft)
    return jit_accept(
        method,
        np.asarray(logits, np.float32),
        draft,
        seeds=SEEDS,
        positions=STARTS + steps,
        temperature=np.full(B, temperature, np.float32),
        filters=Filters.create(B, top_k=top_k),
        with_logprobs=True,
    )


def walk(parents, tokens, length, targets):
    """Node by node: the first child with the target's token."""
    nodes = [0]
    while True:
        here = nodes[-1]
        children = [t for t in range(1, T) if t <= length and parents[t] == here and tokens[t] == targets[here]]
        if not children:
            return nodes
        nodes.append(children[0])


def check_walk(result, parents, tokens, lengths, targets, slots, logits):
    log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)))
    for b in range(B):
        nodes = walk(parents[b], tokens[b], lengths[b], targets[b]) if slots[b] >= 0 else []
        padding = [-1] * (T - len(nodes))
        assert int(result.accept_lens[b]) == len(nodes)
        assert int(result.last_correct_step_indices[b]) == (nodes[-1] if nodes else -1)
        np.testing.assert_array_equal(result.path[b], nodes + padding)
        emitted = [int(targets[b][t]) for t in nodes]
        np.testing.assert_array_equal(result.tokens[b], emitted + padding)
        expected = [log_probs[b, t, token] for t, token in zip(nodes, emitted, strict=True)]
        np.testing.assert_allclose(result.logprobs[b], expected + [0] * len(padding), rtol=1e-6, atol=1e-6)


@st.composite
def drafts_for(draw, targets):
    """Trees over 5 tokens whose nodes mostly carry the target's token after their parent, or none of the vocabulary."""
    parents = draw(trees(B, T))
    wrong = draw(st.lists(st.sampled_from([0, 0, 0, 1, 9]), min_size=B * T, max_size=B * T))
    lengths = draw(st.lists(st.sampled_from([T - 1, T - 1, 3, 0]), min_size=B, max_size=B))
    slots = draw(st.lists(st.integers(-1, 3), min_size=B, max_size=B))
    right = np.take_along_axis(targets, np.maximum(parents, 0), axis=1)
    tokens = (right + np.reshape(wrong, (B, T))).astype(np.int32)
    return Draft(tokens, np.array(lengths, np.int32), np.array(slots, np.int32), parents=parents)


@settings(max_examples=60)
@given(data=st.data())
def test_greedy_walk(data):
    """Several children may carry the right token: the first counts."""
    row = st.lists(st.integers(0, V - 1), min_size=T, max_size=T)
    best = np.array(data.draw(st.lists(row, min_size=B, max_size=B)))
    draft = data.draw(drafts_for(best))
    logits = 5 * np.eye(V)[best]
    result = run(logits, draft)
    check_walk(result, draft.parents, draft.tokens, draft.counts, best, draft.slots, logits)


@functools.cache
def noisy_logits():
    return np.random.default_rng(0).normal(size=(B, T, V)).astype(np.float32)


@jax.jit
def drawn(positions):
    keys = draw_keys(SEEDS, positions, Purpose.TOKEN)
    logits = noisy_logits()
    kept = logits >= np.sort(logits, axis=-1)[..., 1:2]
    return draw_tokens(keys, jnp.where(kept, jax.nn.log_softmax(logits, axis=-1), -jnp.inf))


@settings(max_examples=30)
@given(data=st.data())
def test_coupled_walk(data):
    """Without probabilities: at every node the token of plain sampling, with the noise of its position."""
    parents = data.draw(trees(B, T))
    targets = np.asarray(drawn(STARTS + Tree.create(parents).depths))
    draft = dataclasses.replace(data.draw(drafts_for(targets)), parents=parents)
    right = np.take_along_axis(targets, np.maximum(parents, 0), axis=1)
    tokens = np.where(data.draw(st.booleans()), right, draft.tokens).astype(np.int32)
    draft = dataclasses.replace(draft, tokens=tokens)
    result = run(noisy_logits(), draft, Sampling(), top_k=4)
    check_walk(result, parents, tokens, draft.counts, targets, draft.slots, noisy_logits())


@pytest.mark.parametrize("method", [Greedy(), Sampling()])
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_tree_that_is_a_chain_accepts_as_the_chain(method, with_probs):
    accepted = set()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        logits = 2 * rng.normal(size=(B, T, V))
        probs = np.asarray(jax.nn.softmax(jnp.asarray(logits[:, :-1] + 0.5 * rng.normal(size=(B, T - 1, V)))))
        tokens = np.concatenate([np.zeros((B, 1)), probs.argmax(-1)], axis=1).astype(np.int32)
        lengths, slots = np.array([T - 1, T - 1, 3, T], np.int32), np.array([0, 1, 2, 3], np.int32)
        chain = Draft(tokens, lengths, slots, np.asarray(probs, np.float32) if with_probs else None)
        expected = run(logits, chain, method, top_k=4)
        result = run(logits, dataclasses.replace(chain, parents=chains(B, T)), method, top_k=4)
        for name in ("tokens", "accept_lens", "last_correct_step_indices", "logprobs"):
            np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)
        accepted |= set(np.asarray(expected.accept_lens).tolist())
    assert len(accepted) > 3


def root_level(p, children, probs, temperature=1.0, lengths=T - 1):
    """Accepts one level of `children` under the root, whose target is `p`; `[rows]` accepted nodes and tokens."""
    tokens = np.zeros((B, T), np.int32)
    tokens[:, 1 : len(children) + 1] = children
    parents = np.where(np.arange(T) <= len(children), 0, -1)
    parents[0] = -1
    draft = Draft(
        tokens,
        np.full(B, lengths, np.int32),
        np.arange(B, dtype=np.int32),
        np.broadcast_to(np.asarray(probs, np.float32), (B, T - 1, V)),
        np.tile(parents, (B, 1)).astype(np.int32),
    )
    with np.errstate(divide="ignore"):
        logits = np.broadcast_to(np.log(np.asarray(p)), (B, T, V))
    result = run(logits, draft, Sampling(), temperature)
    return np.asarray(result.last_correct_step_indices), np.asarray(result.tokens)[:, 0]


HALVES = [0.5, 0.5, 0, 0, 0]


def test_siblings_at_their_edges():
    # The target's only token is the second child: the first is rejected for sure, then all of q is on the second.
    node, token = root_level([0, 1, 0, 0, 0], [0, 1], HALVES)
    assert (node == 2).all()
    assert (token == 1).all()
    # At p = q the first child is accepted for sure.
    node, token = root_level(HALVES, [0, 1], HALVES)
    assert (node == 1).all()
    # A repeated sibling, and one outside the vocabulary, are passed over.
    node, token = root_level([0, 1, 0, 0, 0], [0, 0, 9, -1, 1], HALVES)
    assert (node == 5).all()
    # Neither child is possible: the token comes from what is left, which is p.
    node, token = root_level([0, 0, 0, 1, 0], [0, 1], HALVES)
    assert (node == 0).all()
    assert (token == 3).all()
    # Beyond the row's drafts nothing is accepted; greedy rows take the argmax.
    node, token = root_level([0, 1, 0, 0, 0], [0, 1], HALVES, lengths=1)
    assert (node == 0).all()
    assert (token == 1).all()
    node, token = root_level([0.3, 0.4, 0.3, 0, 0], [0, 1], HALVES, temperature=0.0)
    assert (node == 2).all()


def test_a_stop_on_a_path_keeps_the_node_where_it_stopped():
    """Tokens 1, 2, 3 along nodes 0, 2, 5; node 5 is the last correct one."""
    parents = np.tile(np.array([-1, 0, 0, 1, 1, 2], np.int32), (B, 1))
    tokens = np.tile(np.array([0, 4, 1, 0, 0, 2], np.int32), (B, 1))
    best = np.tile(np.array([1, 0, 2, 0, 0, 3]), (B, 1))
    slots = np.array([0, 1, 2, -1], np.int32)
    draft = Draft(tokens, np.full(B, T - 1, np.int32), slots, parents=parents)
    result = run(np.eye(V)[best], draft)
    np.testing.assert_array_equal(result.last_correct_step_indices, [5, 5, 5, -1])
    stops = StopConditions.create((2,))
    states = jnp.zeros(B, jnp.int32)
    cut = limit_accept(result, stops, states, jnp.array([9, 1, 0, 9], jnp.int32), jnp.zeros(B, jnp.int32))
    np.testing.assert_array_equal(cut.result.accept_lens, [2, 1, 0, 0])
    np.testing.assert_array_equal(cut.result.last_correct_step_indices, [2, 0, -1, -1])
    np.testing.assert_array_equal(cut.result.path, [[0, 2] + [-1] * 4, [0] + [-1] * 5, [-1] * 6, [-1] * 6])
    expected = [StopReason.EOS, StopReason.MAX_NEW, StopReason.MAX_NEW, StopReason.NONE]
    np.testing.assert_array_equal(cut.reasons, [reason.value for reason in expected])
    free = limit_accept(result, StopConditions.create(), states, jnp.full(B, 9, jnp.int32), jnp.zeros(B, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, free.result, result)


def test_no_tree_is_refused():
    parents = np.tile(np.array([-1, 0, 3, 0, 0, 0], np.int32), (B, 1))
    draft = Draft(np.zeros((B, T), np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32), parents=parents)
    with pytest.raises(ValueError, match=re.escape("accept: a parent must come before its child")):
        accept(Greedy(), jnp.zeros((B, T, V)), draft)
    with pytest.raises(ValueError, match=re.escape("accept got parents int32[4, 5], expected int32[4, 6]")):
        accept(Greedy(), jnp.zeros((B, T, V)), dataclasses.replace(draft, parents=parents[:, 1:]))
