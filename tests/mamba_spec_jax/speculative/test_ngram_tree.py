"""Prompt lookup as a tree against a trie that plain Python builds."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mamba_spec_jax as ms
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter

from .drafting import quick_prefills, run, texts
from .toy import ToyModel

MAX_LEN = 20


@functools.partial(jax.jit, static_argnames=("drafter", "num_drafts"))
def propose(drafter, tokens, lengths, num_drafts):
    return drafter.propose(None, (), tokens, lengths, None, num_drafts)


def occurrences(text, max_ngram, min_ngram):
    """Where earlier occurrences of the text's suffixes end: those of the longest first, the most recent of equals."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 2, n - 2, -1):
            longer = n < max_ngram and end >= n and text[end - n : end + 1] == text[len(text) - n - 1 :]
            if text[end - n + 1 : end + 1] == text[len(text) - n :] and not longer:
                yield end


def oracle(text, num_drafts, drafter):
    """The trie's tokens and parents, root included, in the order in which its nodes are made."""
    branches = []
    for end in list(occurrences(text, drafter.max_ngram, drafter.min_ngram))[: drafter.max_branches]:
        branch = list(text)
        for source in range(end + 1, end + 1 + num_drafts):
            branch.append(branch[source])
        branches.append(branch[len(text) :])
    nodes, tokens, parents = {(): 0}, [None], [-1]
    places = [(depth, rank) for rank in range(1, len(branches) + 1) for depth in range(1, num_drafts + 1)]
    for depth, rank in sorted(places, key=lambda place: (place[0] * place[1], place[1])):
        path = tuple(branches[rank - 1][:depth])
        if path not in nodes and len(nodes) <= num_drafts:
            parents.append(nodes[path[:-1]])
            tokens.append(path[-1])
            nodes[path] = len(nodes)
    return tokens[1:], parents


rows = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN)


def pad(batch, filler=0):
    tokens = np.full((len(batch), MAX_LEN), filler, np.int32)
    for row, text in enumerate(batch):
        tokens[row, : len(text)] = text
    return tokens, np.array([len(text) for text in batch], np.int32)


@given(
    batch=st.lists(rows, min_size=3, max_size=3),
    filler=st.integers(-1, 2),
    asked=st.sampled_from([(NgramTreeDrafter(7), 7), (NgramTreeDrafter(7, 2), 7), (NgramTreeDrafter(7, 3, 5, 2), 1)]),
)
@settings(max_examples=100)
def test_matches_a_plain_trie(batch, filler, asked):
    drafter, num_drafts = asked
    proposal = propose(drafter, *pad(batch, filler), num_drafts)
    assert proposal.tokens.shape == (3, num_drafts)
    assert proposal.parents.shape == (3, num_drafts + 1)
    assert proposal.tokens.dtype == proposal.counts.dtype == proposal.parents.dtype == np.int32
    assert proposal.probs is None
    for row, text in enumerate(batch):
        length = int(proposal.counts[row])
        tokens, parents = oracle(text, num_drafts, drafter)
        assert proposal.tokens[row, :length].tolist() == tokens
        assert proposal.parents[row, : length + 1].tolist() == parents
        assert set(proposal.parents[row, length + 1 :].tolist()) <= {-1}


@given(batch=st.lists(rows, min_size=3, max_size=3))
@settings(max_examples=20)
def test_one_branch_is_the_chain(batch):
    tree, chain = (
        propose(drafter, *pad(batch), 7) for drafter in (NgramTreeDrafter(7, max_branches=1), ms.NgramDrafter(7))
    )
    np.testing.assert_array_equal(tree.tokens, chain.tokens)
    np.testing.assert_array_equal(tree.counts, chain.counts)
    for row in np.flatnonzero(chain.counts):
        assert tree.parents[row].tolist() == list(range(-1, 7))


def one(text):
    proposal = propose(NgramTreeDrafter(7, 2), *pad([text] * 3), 7)
    length = int(proposal.counts[0])
    return proposal.tokens[0, :length].tolist(), proposal.parents[0, : length + 1].tolist()


def test_single_match_shared_beginnings_and_shares():
    assert one([1, 2, 3, 1]) == ([2, 3, 1, 2, 3, 1, 2], [-1, 0, 1, 2, 3, 4, 5, 6])
    # Both went on with a 2, which they share; then with 9 6 1 2 9, and with 8.
    assert one([1, 2, 8, 7, 1, 2, 9, 6, 1]) == ([2, 9, 6, 1, 8, 2, 9], [-1, 0, 1, 2, 3, 1, 4, 6])
    # The longer match comes first though it is older, and goes twice as deep.
    assert one([4, 1, 5, 6, 7, 1, 8, 4, 1]) == ([5, 6, 8, 7, 1, 4, 8], [-1, 0, 1, 0, 2, 4, 3, 5])
    assert one([1, 2, 3, 4]) == ([], [-1])


def test_fewer_columns_than_branches():
    tokens = np.array([[5, 5]], np.int32)
    proposal = propose(NgramTreeDrafter(3, max_branches=8), tokens, np.array([2]), 3)
    assert proposal.tokens.tolist() == [[5, 5, 5]]
    none = propose(NgramTreeDrafter(3), tokens, np.array([2]), 0)
    assert none.tokens.shape == (1, 0)
    assert none.parents.tolist() == [[-1]]


def test_under_vmap():
    tokens, lengths = pad([[1, 2, 8, 7, 1, 2, 9, 6, 1], [1, 2, 3, 4], [5, 5]])
    together = jax.vmap(lambda row, length: propose(NgramTreeDrafter(7), row[None], length[None], 7))(tokens, lengths)
    jax.tree.map(
        lambda mapped, batched: np.testing.assert_array_equal(mapped[:, 0], batched),
        together,
        propose(NgramTreeDrafter(7), tokens, lengths, 7),
    )


def test_the_loop_is_lossless(monkeypatch):
    quick_prefills(monkeypatch)
    vocab, rng = 6, np.random.default_rng(3)
    logits = rng.normal(size=(vocab + 1, vocab, vocab)).astype(np.float32)
    prompts = [rng.integers(0, vocab, size).tolist() for size in (24, 20, 3)]
    tree, plain = (
        run(ToyModel(vocab), logits, drafter, None, ms.Greedy(), drafts, prompts=prompts, max_new=12)
        for drafter, drafts in [(NgramTreeDrafter(5), 5), (ms.NgramDrafter(5), 0)]
    )
    assert texts(tree) == texts(plain)
    assert tree.statistics.mean_acceptance_length > 1.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramTreeDrafter(-1), "NgramTreeDrafter.max_drafts is -1"),
        (lambda: NgramTreeDrafter(4, 0), "NgramTreeDrafter.max_branches is 0, expected at least 1"),
        (lambda: NgramTreeDrafter(4, max_ngram=2, min_ngram=3), "NgramTreeDrafter got min_ngram=3, max_ngram=2"),
        (lambda: propose(NgramTreeDrafter(8), *pad([[1]]), 9), r"num_drafts=9, expected 0..8 \(max_drafts\)"),
    ],
)
def test_errors_name_the_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
