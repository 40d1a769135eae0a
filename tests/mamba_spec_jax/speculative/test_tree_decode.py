"""The real loop over draft trees: plain decoding's tokens, within each row's limits, to the cache's end."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.speculative.hindsight import Probe, judge
from mamba_spec_jax.speculative.tree import TreeTopology

from ..tiny import DENSE, random_params
from ..trees import path
from .toy import ToyModel, ToyTreeDrafter, random_tables

K, NEW, TREES = 6, 20, 16
PROMPTS = [[3, 9, 4], [5, 5, 1, 2, 8, 8, 7, 3], [11]]
B = len(PROMPTS)
# What is checked is the loop, not the optimiser, whose passes take most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class ScriptedTrees:
    """Another tree at every length of a row; its nodes carry the foreseen token of their depth, or a wrong one.

    Its state: foreseen tokens `[B, M]` by position, trees `[B, TREES, K + 1]`, and what is added to the right token
    `[B, TREES, K + 1]`.
    """

    max_drafts: int = K
    hidden_layers = ()
    proposes_trees = True

    def init(self, batch, max_len):
        shapes = ((batch, max_len), (batch, TREES, K + 1), (batch, TREES, K + 1))
        return tuple(jnp.zeros(shape, jnp.int32) for shape in shapes)

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        foreseen, parents, wrong = (jnp.asarray(leaf) for leaf in state)
        rows = jnp.arange(lengths.shape[0])
        tree, offset = parents[rows, lengths % TREES], wrong[rows, lengths % TREES]
        at = jnp.minimum(lengths[:, None] - 1 + Tree.create(tree).depths, foreseen.shape[1] - 1)
        drafts = (jnp.take_along_axis(foreseen, at, axis=1) + offset) % DENSE.vocab_size
        count = jnp.full(lengths.shape, num_drafts, jnp.int32)
        return ms.Proposal(drafts[:, 1:], count, state, parents=tree)

    def update(self, params, state, progress):
        return state


CONFIG = dataclasses.replace(DENSE, layer_types=("mamba", "attention"))
DRAFTER = ScriptedTrees()


@functools.partial(jax.jit, compiler_options=QUICKLY)
def decode(decoder, weights, state):
    return decoder.until_finished(weights, state)


def run(model, params, state, method, num_drafts):
    return decode(ms.Decoder(model, DRAFTER, method, num_drafts), ms.Weights(params), state)


def begin(model, **requests):
    options = {"max_new": NEW, "temperature": 1, "logprobs": True, **requests}
    return ms.Decoder(model, DRAFTER, ms.Sampling(), K).init(ms.Weights(random_params(model)), PROMPTS, **options)


@functools.cache
def plain(method):
    model = ms.HybridModel.create(CONFIG)
    return jax.device_get(run(model, random_params(model), begin(model), method, 0))


def script(state, foreseen, seed):
    """Random trees in which the right token is likely at a node, and among its siblings more so."""
    rng = np.random.default_rng(seed)
    parents = np.full((B, TREES, K + 1), -1, np.int32)
    for t in range(1, K + 1):
        parents[..., t] = rng.integers(max(0, t - 3), t, (B, TREES))
    wrong = np.where(rng.random(parents.shape) < 0.5, 0, rng.integers(1, 29, parents.shape)).astype(np.int32)
    return dataclasses.replace(state, drafter=(jnp.asarray(foreseen), jnp.asarray(parents), jnp.asarray(wrong)))


CASES = {
    "snapshot": {},
    "chunked, replayed": {"speculative_mode": ms.SpeculativeMode.PREFILL, "strategy": ms.CommitStrategy.REPLAY},
}


def without_room(state):
    """The cache ends with the longest row's last token: nodes without room for their keys have to be left out."""
    tight = max(len(prompt) for prompt in PROMPTS) + NEW
    assert state.cache.max_len >= tight + K
    kv = jax.tree.map(lambda buffer: buffer[:, :tight], state.cache.kv)
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, kv=kv, max_len=tight))


@pytest.mark.parametrize(("case", "method"), [
    ("snapshot", ms.Greedy()), ("snapshot", ms.Sampling()), ("chunked, replayed", ms.Greedy()),
])  # fmt: skip
def test_trees_give_the_tokens_of_plain_decoding(case, method):
    model = ms.HybridModel.create(CONFIG, **CASES[case])
    expected = plain(method)
    for seed, limits in enumerate(([K, K, K], [2, 0, 1])):
        state = begin(model, depth_limit=limits)
        state = script(without_room(state) if case != "snapshot" else state, expected.tokens, seed)
        state = jax.device_get(run(model, random_params(model), state, method, K))
        np.testing.assert_array_equal(state.tokens, expected.tokens)
        np.testing.assert_array_equal(state.lengths, expected.lengths)
        np.testing.assert_allclose(state.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(state.cache.lengths, expected.cache.lengths)
        held = model.materialize(jax.device_put(state.cache), jnp.arange(len(PROMPTS), dtype=jnp.int32)).mamba
        for name in ("ssm", "conv"):
            np.testing.assert_allclose(getattr(held, name), getattr(expected.cache.mamba, name), rtol=1e-4, atol=1e-4)
        histogram = state.statistics.histogram
        np.testing.assert_array_equal(state.statistics.emitted, [NEW] * B)
        np.testing.assert_array_equal(histogram.sum(axis=1), state.statistics.passes)
        for row, limit in enumerate(limits):
            assert histogram[row, limit + 1 :].sum() == 0, "deeper than the row's limit"
            assert limit == 0 or histogram[row, 1:].sum() > 2, "hardly any draft was accepted: nothing was tested"
        if seed:
            assert state.statistics.drafted[1] == 0


def test_drafts_judged_in_hindsight():
    """A plain chunk with an automatic number of drafts asks how deep a tree would have got."""
    model, expected = ms.HybridModel.create(CONFIG), plain(ms.Greedy())
    state = script(begin(model), expected.tokens, seed=0)
    starts = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    proposal = jax.jit(lambda state: DRAFTER.propose(None, state.drafter, state.tokens, starts, None, K))(state)
    counts, lengths = np.array([K, 3, -1], np.int32), starts + np.array([NEW, NEW, NEW], np.int32)
    probe = Probe(proposal.tokens, proposal.parents, counts, starts)
    foreseen = jax.jit(lambda state: judge(jax.tree.map(lambda leaf: leaf[None], probe), state)[0])
    found = foreseen(dataclasses.replace(expected, lengths=lengths))
    for row in range(B):
        following = expected.tokens[row, starts[row] :]
        deepest = 0
        for node in range(1, max(counts[row], 0) + 1):
            nodes = path(np.asarray(proposal.parents)[row], node)
            right = [proposal.tokens[row, t - 1] == following[d] for d, t in enumerate(nodes[1:])]
            deepest = max(deepest, len(right) if all(right) else 0)
        assert found[row] == (deepest if counts[row] >= 0 else -1)
    assert max(found) > 1
    at_once = dataclasses.replace(expected, lengths=starts + 1)
    found = foreseen(at_once)
    assert max(found) == 1, "no more than the text that there is"


TOY = ToyModel(5)
LOGITS, TABLE = random_tables(seed=0, vocab=5, floor=0.05)
TOY_DRAFTER = ToyTreeDrafter(TABLE, TreeTopology.from_branching([2, 2]))


def test_a_tree_makes_room_for_itself():
    chain, tree = (
        ms.Decoder(TOY, drafter).init(ms.Weights(LOGITS), [[1, 2]], max_new=62)
        for drafter in (ms.NgramDrafter(6), TOY_DRAFTER)
    )
    assert (chain.cache.max_len, tree.cache.max_len) == (64, 128)


class Wrong(ToyTreeDrafter):
    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        proposal = super().propose(params, state, tokens, lengths, choose, num_drafts)
        parents = np.array(proposal.parents)
        parents[:, 2] = 5
        return dataclasses.replace(proposal, parents=parents)


class Narrow(ToyTreeDrafter):
    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        proposal = super().propose(params, state, tokens, lengths, choose, num_drafts)
        return dataclasses.replace(proposal, parents=proposal.parents[:, 1:])


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Wrong, "Wrong.propose: a parent must come before its child, and the root has none (-1): parents[0, 2] is 5"),
        (Narrow, "Narrow.propose got parents int32[1, 6], expected int32[1, 7]"),
    ],
)
def test_what_is_no_tree_is_refused_while_tracing(drafter, message):
    decoder, weights = ms.Decoder(TOY, drafter(TABLE, TOY_DRAFTER.topology)), ms.Weights(LOGITS)
    state = decoder.init(weights, [[1, 2]], max_new=8)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(decoder.step, weights, state)


def test_a_model_refuses_what_is_no_tree():
    model = ms.HybridModel.create(CONFIG)
    params, cache, rows = model.abstract_params(), model.init_cache(1, 8), jnp.zeros(1, jnp.int32)
    for parents, message in (
        (np.array([[-1, 2, 0]]), "verify: a parent must come before its child"),
        (np.array([[-1, 0]]), "verify got parents int64[1, 2], expected int32[1, 3]"),
    ):
        draft = ms.Draft(jnp.zeros((1, 3), jnp.int32), rows, rows, parents=parents)
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(lambda *args: model.verify(args[0], draft, args[1]), params, cache)  # noqa: B023
