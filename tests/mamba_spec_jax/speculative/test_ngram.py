"""Prompt lookup against a brute-force search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter

pytestmark = pytest.mark.usefixtures("quick_compilation")

MAX_LEN = 20


@functools.partial(jax.jit, static_argnames=("drafter", "num_drafts"))
def propose(drafter, tokens, lengths, num_drafts):
    return drafter.propose(None, (), tokens, lengths, None, num_drafts)


def oracle(tokens, num_drafts, max_ngram, min_ngram):
    """The continuation, token by token, of the latest earlier occurrence of the longest suffix."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :] and n < len(tokens):
                text = list(tokens)
                for source in range(start + n, start + n + num_drafts):
                    text.append(text[source])
                return text[len(tokens) :]
    return []


rows = st.lists(st.integers(0, 2), min_size=1, max_size=MAX_LEN)


@given(
    batch=st.lists(rows, min_size=3, max_size=3),
    filler=st.integers(-1, 2),
    drafter=st.sampled_from([NgramDrafter(6), NgramDrafter(6, 3, 2), NgramDrafter(6, 5, 5)]),
    num_drafts=st.sampled_from([1, 6]),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_matches_brute_force(batch, filler, drafter, num_drafts):
    tokens = np.full((3, MAX_LEN), filler, np.int32)
    for row, text in enumerate(batch):
        tokens[row, : len(text)] = text
    proposal = propose(drafter, tokens, np.array([len(text) for text in batch], np.int32), num_drafts)
    assert proposal.tokens.shape == (3, num_drafts)
    assert proposal.tokens.dtype == proposal.counts.dtype == jnp.int32
    assert proposal.probs is None
    for row, text in enumerate(batch):
        expected = oracle(text, num_drafts, drafter.max_ngram, drafter.min_ngram)
        assert proposal.tokens[row, : proposal.counts[row]].tolist() == expected


def one(tokens, num_drafts=8, **settings):
    padded = np.zeros((1, MAX_LEN), np.int32)
    padded[0, : len(tokens)] = tokens
    proposal = propose(NgramDrafter(8, **settings), padded, np.array([len(tokens)]), 8)
    assert proposal.counts[0] in (0, 8)
    return proposal.tokens[0, : proposal.counts[0]].tolist()[:num_drafts]


def test_longest_suffix_wins_over_recency_and_recency_among_equals():
    assert one([1, 2, 3, 9, 8, 3, 7, 2, 3], 1) == [9]
    assert one([1, 2, 3, 9, 8, 3, 7, 2, 3], 1, max_ngram=1) == [7]
    assert one([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]


def test_period_shorter_than_the_draft_goes_on():
    assert one([5, 1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert one([5, 7, 7], 3) == [7, 7, 7]


def test_nothing_to_propose():
    assert one([1, 2, 3, 4]) == []
    assert one([3]) == []
    assert one([1, 2, 9, 8, 2], min_ngram=2) == []
    assert one([]) == []
    none = propose(NgramDrafter(8), np.zeros((2, MAX_LEN), np.int32), np.array([4, 4]), 0)
    assert none.tokens.shape == (2, 0)
    assert none.counts.tolist() == [0, 0]


def test_keeps_no_state():
    drafter = NgramDrafter(4)
    assert drafter.init(3, 100) == ()
    assert drafter.update(None, (), None) == ()
    assert hash(drafter) == hash(NgramDrafter(4))


def test_memory_is_linear_in_the_text():
    batch, width = 8, 1024
    compiled = propose.lower(NgramDrafter(8), jnp.zeros((batch, width), jnp.int32), jnp.zeros((batch,), jnp.int32), 8)
    assert compiled.compile().memory_analysis().temp_size_in_bytes < 16 * batch * width * 4 < batch * width * width


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NgramDrafter(-1), "NgramDrafter.max_drafts is -1"),
        (lambda: NgramDrafter(4, max_ngram=2, min_ngram=3), "min_ngram=3, max_ngram=2"),
        (lambda: NgramDrafter(4, min_ngram=0), "min_ngram=0, max_ngram=4"),
        (
            lambda: propose(NgramDrafter(8), np.zeros((1, 4), np.int32), np.array([4]), 9),
            r"num_drafts=9, expected 0..8 \(max_drafts\)",
        ),
    ],
)
def test_errors_name_the_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
