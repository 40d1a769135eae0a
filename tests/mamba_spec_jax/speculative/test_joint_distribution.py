"""What the real loop emits, against the exact joint distribution, by chi-square.

The target is a second-order Markov chain over five tokens whose recurrent state is its last committed token, so the
loop's commit is part of what is tested. One run is one row of a batch of 10^5, each with a seed of its own.

Three consecutive tokens from a given start have probability p(x1) p(x2 | x1) p(x3 | x1, x2), whatever was drafted. The
number a of tokens that the first pass emits joins them: with m = min(p, q) at each node, two drafts give
    a = 3:  m(x1) m(x2 | x1) p(x3 | x1, x2)                  both accepted, x3 is the bonus token
    a = 2:  m(x1) (p - m)(x2 | x1) p(x3 | x1, x2)            x2 corrects a rejected draft
    a = 1:  (p - m)(x1) p(x2 | x1) p(x3 | x1, x2)            x1 does
since p - m = max(p - q, 0) is the residual times the probability of a rejection. A row with fewer drafts ends earlier.

alpha = 1e-3 for every test; seeds are fixed, so an outcome is a fact about the code and never a flake. The mutants must
be rejected at 1e-9.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from mamba_spec_jax.speculative import acceptance
from mamba_spec_jax.speculative import decoder as decoding
from mamba_spec_jax.speculative.acceptance import accept
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.sampling import Filters, Sampling, filtered_log_probs
from mamba_spec_jax.speculative.state import Weights

from .toy import ToyDrafter, ToyModel, random_tables

RUNS, VOCAB, K = 100_000, 5, 2
ALPHA, MUTANT = 1e-3, 1e-9
PROMPT = [3, 0, 2]
LOGITS, TABLE = random_tables(seed=0, vocab=VOCAB, floor=0.05)
MODEL, DRAFTER, WEIGHTS = ToyModel(VOCAB), ToyDrafter(TABLE, K), Weights(LOGITS)


def make_step(drafter=DRAFTER):
    """The real loop's step, traced anew: jit would reuse a program from before a mutation for the function itself."""
    return jax.jit(lambda state: Decoder(MODEL, drafter, Sampling()).step(WEIGHTS, state))


def run_loop(step, steps=3, **requests):
    """Steps 10^5 rows; returns their first `steps` tokens and how many the first pass emitted."""
    requests = {"max_new": 20, "temperature": 1, **requests}
    state = Decoder(MODEL, DRAFTER, Sampling()).init(WEIGHTS, [PROMPT] * RUNS, **requests)
    state = step(state)
    first = np.asarray(state.new_tokens)
    for _ in range(steps - 1):
        state = step(state)
    assert np.min(state.new_tokens) >= steps  # every pass emits, a mutant's too
    return np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + steps], first


def target_probs(temperature=1.0, **filters):
    """`[V + 1, V, V]` what the target draws from, in float64."""
    rows = LOGITS.reshape(-1, VOCAB)
    filters = Filters.create(len(rows), **filters)
    log_probs = filtered_log_probs(rows, jnp.full(len(rows), temperature), filters)
    probs = np.exp(np.asarray(log_probs, np.float64))
    return (probs / probs.sum(axis=-1, keepdims=True)).reshape(LOGITS.shape)


def exact_joint(p, num_drafts):
    """`[3, V, V, V]` probability of (tokens the first pass emits - 1, x1, x2, x3)."""
    p1 = p[PROMPT[-2] + 1, PROMPT[-1]]
    p2 = p[PROMPT[-1] + 1]
    p3 = p[1:]
    q = np.asarray(TABLE)
    m1 = np.minimum(p1, q[PROMPT[-1]]) if num_drafts >= 1 else np.zeros(VOCAB)
    m2 = np.minimum(p2, q) if num_drafts >= 2 else np.zeros((VOCAB, VOCAB))
    joint = np.stack(
        [
            np.einsum("a,ab,abc->abc", p1 - m1, p2, p3),
            np.einsum("a,ab,abc->abc", m1, p2 - m2, p3),
            np.einsum("a,ab,abc->abc", m1, m2, p3),
        ]
    )
    np.testing.assert_allclose(joint.sum(), 1, rtol=1e-9)
    np.testing.assert_allclose(joint.sum(axis=0), np.einsum("a,ab,abc->abc", p1, p2, p3), rtol=1e-9)
    return joint


def p_value(observed, expected):
    """Chi-square of counts against probabilities, 0 if the impossible was observed.

    Cells expected fewer than 5 times are taken together.
    """
    observed, expected = observed.ravel(), expected.ravel() * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:  # too rare even together: they join the smallest of the others
        smallest = np.argmin(expected[:-1])
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return scipy.stats.chisquare(observed, expected).pvalue


def count(tokens, first):
    counts = np.zeros((K + 1, VOCAB, VOCAB, VOCAB), np.int64)
    np.add.at(counts, (first - 1, *tokens.T), 1)
    return counts


def count_tokens(tokens):
    counts = np.zeros((VOCAB,) * 3, np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    return counts


def count_with_first(tokens, first):
    counts = np.zeros((K + 1, VOCAB, VOCAB, VOCAB), np.int64)
    np.add.at(counts, (first - 1, *tokens.T), 1)
    return counts


def test_three_tokens_have_the_targets_distribution():
    tokens, first = run_loop(make_step(), steps=5)
    p = target_probs()
    exact = exact_joint(p, K)
    assert exact.sum(axis=(1, 2, 3)).min() > 0.1  # accept, reject and bonus all happen
    assert p_value(count_tokens(tokens[:, :3]), exact.sum(axis=0)) > ALPHA
    assert p_value(count_with_first(tokens[:, :3], first), exact) > ALPHA

    # So do tokens 3 to 5, when rows have drifted apart and every state went through commits of its own.
    start = np.einsum("a,ab->ab", p[PROMPT[-2] + 1, PROMPT[-1]], p[PROMPT[-1] + 1])
    later = np.einsum("ab,abc,bcd,cde->cde", start, p[1:], p[1:], p[1:])
    assert p_value(count_tokens(tokens[:, 2:]), later) > ALPHA


def test_ragged_drafts_filters_and_temperature():
    """Rows with no, one and two drafts side by side, under a filtered target."""
    options = {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05}
    limits = np.arange(RUNS) % (K + 1)
    tokens, first = run_loop(make_step(), depth_limit=limits, **options)
    p = target_probs(**options)
    assert np.any(p == 0)
    for limit in range(K + 1):
        rows = limits == limit
        assert p_value(count_with_first(tokens[rows], first[rows]), exact_joint(p, limit)) > ALPHA, limit


def test_point_mass_drafts_give_the_tokens_of_plain_sampling():
    step = make_step(dataclasses.replace(DRAFTER, point_mass=True))
    tokens, first = run_loop(step)
    plain, one = run_loop(step, depth_limit=0)
    assert set(one) == {1}
    assert set(first) == {1, 2, 3}
    np.testing.assert_array_equal(tokens, plain)
    assert p_value(count_tokens(tokens), exact_joint(target_probs(), K).sum(axis=0)) > ALPHA


def test_a_wrong_residual_fails(monkeypatch):
    """A rejected draft is corrected with a draw from p."""
    monkeypatch.setattr(acceptance, "residual", lambda p, q: p)
    tokens, first = run_loop(make_step())
    exact = exact_joint(target_probs(), K)
    assert p_value(count_tokens(tokens), exact.sum(axis=0)) < MUTANT
    assert p_value(count_with_first(tokens, first), exact) < MUTANT


def test_a_dropped_bonus_fails(monkeypatch):
    """The bonus token of fully accepted drafts goes missing; even rows commit all drafts nevertheless, odd ones not."""
    committed = np.arange(RUNS) % 2 == 0

    def mutated(method, logits, draft, **options):
        result = accept(method, logits, draft, **options)
        lengths = jnp.where(result.accept_lens == K + 1, K, result.accept_lens)
        last = jnp.where(committed, result.last_correct_step_indices, lengths - 1)
        return dataclasses.replace(result, accept_lens=lengths, last_correct_step_indices=last)

    monkeypatch.setattr(decoding, "accept", mutated)
    tokens, first = run_loop(make_step())
    exact = exact_joint(target_probs(), K)
    # A state one token ahead of its text: the tokens are wrong.
    assert p_value(count_tokens(tokens[committed]), exact.sum(axis=0)) < MUTANT
    # Taken back, it costs a token a pass and is lossless; only the joint distribution with that number shows it.
    assert p_value(count_tokens(tokens[~committed]), exact.sum(axis=0)) > ALPHA
    for rows in (committed, ~committed):
        assert p_value(count_with_first(tokens[rows], first[rows]), exact) < MUTANT
