"""Draft trees through the real loop, against the exact joint distribution; see `test_joint_distribution`.

Every node of the tree has two children, drawn without replacement from q. With r = max(q - p, 0) and p' = max(p - q, 0)
normalised, a child with token x is accepted with probability
    A(x) = min(p, q)(x) + sum_d r(d) min(p', q without d)(x)
the second term being that of the second child after the first one, d, was rejected. What follows a node without an
accepted child has p - A, so the chain's formulas hold with A in place of min(p, q).

alpha = 1e-3 for every test, and the mutants must be rejected at 1e-9, with fixed seeds.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.speculative import tree_acceptance
from mamba_spec_jax.speculative.acceptance import accept
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.sampling import Sampling
from mamba_spec_jax.speculative.state import Weights
from mamba_spec_jax.speculative.tree import TreeTopology

from .test_joint_distribution import (
    ALPHA,
    LOGITS,
    MODEL,
    MUTANT,
    PROMPT,
    TABLE,
    VOCAB,
    count_tokens,
    p_value,
    target_probs,
)
from .toy import ToyTreeDrafter

RUNS, STEPS, DEPTH = 100_000, 3, 2
SEEDS = RUNS  # the first row's
DRAFTER = ToyTreeDrafter(TABLE, TreeTopology.from_branching([2] * DEPTH))


def run_loop(drafter=DRAFTER, **requests):
    """The first tokens of RUNS rows after some steps, and how many of them the first pass emitted."""
    decoder, weights = Decoder(MODEL, drafter, Sampling()), Weights(LOGITS)
    step = jax.jit(lambda state: decoder.step(weights, state))
    requests = {"max_new": 8, "seeds": SEEDS, "temperature": 1, **requests}
    state = decoder.init(weights, [PROMPT] * RUNS, **requests)
    state = step(state)
    first = np.asarray(state.new_tokens)
    for _ in range(STEPS - 1):
        state = step(state)
    assert np.min(state.new_tokens) >= STEPS
    return np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + STEPS], first


def accepted(p, q):
    """A, for p and q `[..., V]`."""
    taken = np.minimum(p, q)
    rest = p - taken
    rest = rest / np.maximum(rest.sum(axis=-1, keepdims=True), 1e-300)
    for d in range(VOCAB):
        others = np.where(np.arange(VOCAB) == d, 0, q)
        others = others / others.sum(axis=-1, keepdims=True)
        taken = taken + np.maximum(q - p, 0)[..., d : d + 1] * np.minimum(rest, others)
    return taken


def exact_joint(depth):
    """`[3, V, V, V]` probability of (tokens the first pass emits - 1, x1, x2, x3)."""
    p, q = target_probs(), np.asarray(TABLE)
    p1, p2, p3 = p[PROMPT[-2] + 1, PROMPT[-1]], p[PROMPT[-1] + 1], p[1:]
    a1 = accepted(p1, q[PROMPT[-1]]) * (depth >= 1)
    a2 = accepted(p2, q) * (depth >= 2)
    joint = np.stack(
        [
            np.einsum("a,ab,abc->abc", p1 - a1, p2, p3),
            np.einsum("a,ab,abc->abc", a1, p2 - a2, p3),
            np.einsum("a,ab,abc->abc", a1, a2, p3),
        ]
    )
    np.testing.assert_allclose(joint.sum(), 1, rtol=1e-9)
    return joint


def count_with_first(tokens, first):
    counts = np.zeros((DEPTH + 1, *[VOCAB] * STEPS), np.int64)
    np.add.at(counts, (first - 1, *tokens.T), 1)
    return counts


def test_three_tokens_have_the_targets_distribution():
    """Rows that may go no, one and two nodes deep side by side."""
    limits = np.arange(RUNS) % (DEPTH + 1)
    tokens, first = run_loop(depth_limit=limits)
    assert exact_joint(DEPTH).sum(axis=(1, 2, 3)).min() > 0.1
    for limit in range(DEPTH + 1):
        rows = limits == limit
        assert p_value(count_with_first(tokens[rows], first[rows]), exact_joint(limit)) > ALPHA, limit
    assert p_value(count_tokens(tokens), exact_joint(0).sum(axis=0)) > ALPHA


def test_nodes_chosen_outright_give_the_tokens_of_plain_sampling():
    """Row by row: every other row has its predecessor's seed, and no drafts."""
    drafter = dataclasses.replace(DRAFTER, point_mass=True)
    rows = np.arange(RUNS)
    tokens, first = run_loop(drafter, seeds=rows // 2, depth_limit=DEPTH * (rows % 2))
    assert set(first[0::2]) == {1}
    assert set(first[1::2]) == {1, 2, 3}
    np.testing.assert_array_equal(tokens[1::2], tokens[0::2])
    assert p_value(count_tokens(tokens[1::2]), exact_joint(0).sum(axis=0)) > ALPHA


P = np.array([0.05, 0.55, 0.2, 0.15, 0.05])
Q = np.array([0.7, 0.1, 0.1, 0.05, 0.05])


def three_children():
    """p-value of the tokens after one node with three children, where the first child is mostly rejected."""
    rng = np.random.default_rng(0)
    children = np.argsort(-(np.log(Q) + rng.gumbel(size=(RUNS, VOCAB))), axis=1)[:, :3]
    nodes = np.zeros((RUNS, 4), np.int32)
    draft = Draft(
        tokens=np.concatenate([nodes[:, :1], children], axis=1).astype(np.int32),
        counts=nodes[:, 0] + 3,
        slots=nodes[:, 0],
        probs=np.broadcast_to(Q, (RUNS, 3, VOCAB)).astype(np.float32),
        parents=TreeTopology.from_branching([3]).rows(RUNS),
    )

    @jax.jit
    def first_tokens(draft, seeds):
        logits = jnp.broadcast_to(jnp.log(jnp.asarray(P, jnp.float32)), (RUNS, 4, VOCAB))
        ones = jnp.ones(RUNS)
        return accept(Sampling(), logits, draft, seeds=seeds, positions=nodes, temperature=ones).tokens[:, 0]

    return p_value(np.bincount(first_tokens(draft, np.arange(RUNS, dtype=np.uint32)), minlength=VOCAB), P)


def test_three_children_in_turn():
    assert three_children() > ALPHA


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("residual", lambda p, q: p),  # a rejection leaves p as it was
        ("without", lambda q, tokens: q),  # the next sibling is taken as drawn from the same q as the first
    ],
)
def test_mutants_fail(monkeypatch, name, mutant):
    monkeypatch.setattr(tree_acceptance, name, mutant)
    assert three_children() < MUTANT
