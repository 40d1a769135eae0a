"""One drafter where another has nothing to say: the choice, what both are told, and the distribution."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.speculative.drafters import fallback
from mamba_spec_jax.speculative.drafters.draft_model import DraftModelDrafter
from mamba_spec_jax.speculative.drafters.fallback import FallbackDrafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from mamba_spec_jax.speculative.protocol import Progress
from mamba_spec_jax.speculative.sampling import TokenChoice

from ..tiny import DENSE, random_params
from .drafting import assert_has_read_the_text, quick_prefills, run, texts
from .test_joint_distribution import (
    ALPHA,
    LOGITS,
    MODEL,
    MUTANT,
    PROMPT,
    TABLE,
    VOCAB,
    count_tokens,
    exact_joint,
    p_value,
    target_probs,
)
from .toy import ToyDrafter, ToyModel

K = 3
TREE = np.array([[-1, 0, 0, 1], [-1, 0, 1, 1]], np.int32)
CHAIN = [-1, 0, 1, 2]


@dataclasses.dataclass(frozen=True)
class Canned:
    """Says the same to every row: `token` K times, `lengths[b]` of them real."""

    token: int
    lengths: tuple[int, ...]
    tree: bool = False
    probs: float | None = None
    hidden_layers: tuple[int, ...] = ()
    max_drafts: int = K
    vocab_size: int | None = None

    @property
    def proposes_trees(self):
        return self.tree

    def init(self, batch, max_len):
        return f"state of {self.token}"

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        B = len(self.lengths)
        return ms.Proposal(
            tokens=jnp.full((B, num_drafts), self.token, jnp.int32),
            counts=jnp.asarray(self.lengths, jnp.int32),
            state=(params, state, choose.method),
            probs=None if self.probs is None else jnp.full((B, num_drafts, 5), self.probs, jnp.float32),
            parents=TREE if self.tree else None,
        )

    def update(self, params, state, progress):
        return params, state, progress


SEEDS = jnp.zeros(2, jnp.uint32)
CHOOSE = TokenChoice(SEEDS, jnp.ones(2), ms.Sampling())


def propose(first, second, params=None):
    drafter = FallbackDrafter(first, second)
    rows = jnp.ones(2, jnp.int32)
    return drafter.propose(params, drafter.init(2, 8), jnp.zeros((2, 8), jnp.int32), rows, CHOOSE, K)


def test_rows_without_a_proposal_take_the_others():
    proposal = propose(Canned(1, (2, 0)), Canned(2, (3, 1)), ("one", "two"))
    assert proposal.tokens.tolist() == [[1] * K, [2] * K]
    assert proposal.counts.tolist() == [2, 1]
    assert proposal.parents is None
    assert proposal.probs is None
    assert proposal.state == (("one", "state of 1", ms.Sampling()), ("two", "state of 2", ms.Sampling()))
    assert propose(Canned(1, (0, 0)), Canned(2, (0, 3))).counts.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("first_tree", "second_tree", "expected"),
    [
        (True, False, [TREE[0].tolist(), CHAIN]),
        (False, True, [CHAIN, TREE[1].tolist()]),
        (True, True, TREE.tolist()),
    ],
)
def test_chains_beside_trees_are_trees(first_tree, second_tree, expected):
    first, second = Canned(1, (2, 0), first_tree), Canned(2, (3, 1), second_tree)
    assert FallbackDrafter(first, second).proposes_trees
    assert propose(first, second).parents.tolist() == expected
    assert not FallbackDrafter(Canned(1, (1, 1)), Canned(2, (1, 1))).proposes_trees


def test_drafts_chosen_outright_become_point_masses_and_are_chosen_greedily():
    for given in [(None, 0.25), (0.25, None)]:
        proposal = propose(*(Canned(token, (3, 0), probs=probs) for token, probs in zip((1, 2), given, strict=True)))
        for row, (token, probs) in enumerate(zip((1, 2), given, strict=True)):
            expected = np.eye(5)[token] if probs is None else np.full(5, probs)
            np.testing.assert_array_equal(proposal.probs[row], np.tile(expected, (K, 1)))
            assert proposal.state[row][-1] == (ms.Greedy() if probs is None else ms.Sampling())
    both = propose(Canned(1, (3, 0), probs=0.25), Canned(2, (3, 3), probs=0.5))
    assert both.probs[:, 0, 0].tolist() == [0.25, 0.5]


def test_each_reads_its_own_hidden_states():
    first, second = Canned(1, (0,), hidden_layers=(4, 2)), Canned(2, (0,), hidden_layers=(2, 7))
    drafter = FallbackDrafter(first, second)
    assert drafter.hidden_layers == (4, 2, 7)
    hidden = tuple(f"layer {layer}" for layer in drafter.hidden_layers)
    progress = Progress(jnp.zeros((1, 1), jnp.int32), None, hidden, None, ms.ForwardMode.EXTEND)
    seen = drafter.update(("one", "two"), drafter.init(1, 8), progress)
    assert [(params, state, progress.hidden) for params, state, progress in seen] == [
        ("one", "state of 1", ("layer 4", "layer 2")),
        ("two", "state of 2", ("layer 2", "layer 7")),
    ]
    assert not any(progress.as_proposed for *_, progress in seen)


TARGET = ms.HybridModel.create(dataclasses.replace(DENSE, layer_types=("mamba", "attention")))
PARAMS = random_params(TARGET)


@dataclasses.dataclass(frozen=True)
class Foresight:
    """Knows each row's text, and says what comes next, but for the last draft, where a row's length is even."""

    text: tuple[tuple[int, ...], ...]
    max_drafts: int = K
    hidden_layers = ()
    proposes_trees = False

    def init(self, batch, max_len):
        return ()

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        text = jnp.asarray(self.text, jnp.int32)
        at = lengths[:, None] + jnp.arange(num_drafts)
        drafts = jnp.take_along_axis(text, jnp.minimum(at, text.shape[1] - 1), axis=1).at[:, -1].add(1)
        return ms.Proposal(drafts, jnp.where(lengths % 2 == 0, num_drafts, 0), state)

    def update(self, params, state, progress):
        return state


def test_a_draft_model_follows_what_it_did_not_propose(monkeypatch):
    """The first is right K - 1 times when it is asked; the draft model, with weights of its own, hardly ever."""
    quick_prefills(monkeypatch)
    requests = {"max_new": [12, 9, 16], "temperature": [0, 0.8, 0]}
    plain = run(TARGET, PARAMS, ms.NgramDrafter(K), None, ms.Sampling(), 0, **requests)
    first, params = Foresight(tuple(map(tuple, plain.tokens.tolist()))), random_params(TARGET, 1)
    drafter = FallbackDrafter(first, DraftModelDrafter(TARGET, K))
    state = run(TARGET, PARAMS, drafter, (None, params), ms.Sampling(), K, **requests)
    assert texts(state) == texts(plain)
    assert np.all(state.statistics.histogram[:, [0, K - 1]] > 0), "a row in which one of the two had no say"
    assert_has_read_the_text(state.drafter[1].cache, TARGET, params, state)


def test_a_tree_first_and_a_chain_second_are_lossless(monkeypatch):
    quick_prefills(monkeypatch)
    vocab, rng = 6, np.random.default_rng(3)
    logits = rng.normal(size=(vocab + 1, vocab, vocab)).astype(np.float32)
    prompts = [rng.integers(0, vocab, size).tolist() for size in (24, 5, 3)]
    drafter = FallbackDrafter(NgramTreeDrafter(5, min_ngram=2), ms.NgramDrafter(6))
    assert drafter.max_drafts == 5
    fallen_back, plain = (
        run(ToyModel(vocab), logits, drafter, None, ms.Greedy(), drafts, prompts=prompts, max_new=12)
        for drafter, drafts in [(drafter, 5), (ms.NgramDrafter(5), 0)]
    )
    assert texts(fallen_back) == texts(plain)
    assert fallen_back.statistics.mean_acceptance_length > 1.2


@dataclasses.dataclass(frozen=True)
class Coupled(ToyDrafter):
    """Chooses as it is told to, from the table's next distribution, in every other row."""

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        table = jnp.log(jnp.asarray(self.table, jnp.float32))
        token, drafts = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0], []
        for k in range(num_drafts):
            token = choose(table[token], lengths + k)
            drafts.append(token)
        count = jnp.where((state + lengths.astype(jnp.uint32)) % 2 == 0, num_drafts, 0)
        return ms.Proposal(jnp.stack(drafts, axis=1), count.astype(jnp.int32), state)


RUNS, DRAFTS = 20_000, 2


def drawn_tokens(steps):
    """The first tokens of RUNS rows, as many as there are steps."""
    drafter = FallbackDrafter(Coupled(TABLE, DRAFTS), ToyDrafter(TABLE, DRAFTS))
    decoder, weights = ms.Decoder(MODEL, drafter, ms.Sampling()), ms.Weights(LOGITS)
    step = jax.jit(lambda state: decoder.step(weights, state))
    state = decoder.init(weights, [PROMPT] * RUNS, max_new=12, temperature=1)
    for _ in range(steps):
        state = step(state)
    return np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + steps]


def test_point_masses_beside_probs_keep_the_distribution(monkeypatch):
    quick_prefills(monkeypatch)
    expected = exact_joint(target_probs(), DRAFTS).sum(axis=0)
    assert expected.shape == (VOCAB,) * 3
    tokens = drawn_tokens(3)
    assert p_value(count_tokens(tokens), expected) > ALPHA
    # Chosen with the target's noise they would not: the noise that corrects a draft would have chosen it.
    monkeypatch.setattr(fallback, "Greedy", ms.Sampling)
    assert p_value(count_tokens(drawn_tokens(3)), expected) < MUTANT


class Late(Canned):
    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        proposal = super().propose(params, state, tokens, lengths, choose, num_drafts)
        return dataclasses.replace(proposal, parents=np.array([[-1, 2, 0, 1]] * 2, np.int32))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: propose(Canned(1, (1, 1), tree=True), Canned(2, (1, 1), probs=0.2)),
            "Canned proposes with probs and Canned without, expected both or neither",
        ),
        (
            lambda: propose(Canned(1, (1, 1)), Canned(2, (1, 1)), {"first": 1}),
            r"params of type dict, expected \(first's, second's\)",
        ),
        (lambda: propose(Late(1, (1, 1), tree=True), Canned(2, (1, 1))), r"Late.propose.* parents\[0, 1\] is 2"),
    ],
)
def test_errors_name_the_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_vocabulary_is_the_smaller_one():
    assert FallbackDrafter(Canned(1, (1,)), Canned(2, (1,), vocab_size=7)).vocab_size == 7
    assert FallbackDrafter(Canned(1, (1,), vocab_size=9), Canned(2, (1,), vocab_size=7)).vocab_size == 7
    assert FallbackDrafter(Canned(1, (1,)), Canned(2, (1,))).vocab_size is None
    with pytest.raises(ValueError, match="FallbackDrafter has a vocabulary of 4 tokens, but the target one of 5"):
        ms.Decoder(MODEL, FallbackDrafter(ms.NgramDrafter(K), Canned(2, (1,), vocab_size=4)))
