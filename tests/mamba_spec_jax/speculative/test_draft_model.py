"""A language model as drafter: lossless, and its own state on the accepted text."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.speculative.drafters.draft_model import DraftModelDrafter
from mamba_spec_jax.speculative.protocol import Progress
from mamba_spec_jax.speculative.sampling import TokenChoice

from ..tiny import DENSE, random_params
from .drafting import PROMPTS, QUICKLY, assert_has_read_the_text, quick_prefills, run, texts

K = 3
# As a draft model, the target verifies by steps; the other one in chunks.
TARGET = ms.HybridModel.create(dataclasses.replace(DENSE, layer_types=("mamba", "attention")))
OTHER = ms.HybridModel.create(
    dataclasses.replace(DENSE, layer_types=("attention", "mamba"), rope_theta=10_000.0),
    speculative_mode=ms.SpeculativeMode.PREFILL,
)
PARAMS, OTHER_PARAMS = random_params(TARGET), random_params(OTHER, 1)
BUDGETS = [12, 9, 16]
SAMPLED = {"max_new": BUDGETS, "temperature": [0.8, 0, 1.3], "seeds": 3}
GREEDY = {"max_new": BUDGETS, "temperature": 0}


@pytest.fixture(autouse=True, scope="module")
def _quick_prefills():
    with pytest.MonkeyPatch.context() as monkeypatch:
        quick_prefills(monkeypatch)
        yield


@functools.cache
def plain(temperature):
    """The texts without speculation: no draft model, no drafts."""
    requests = {"sampled": SAMPLED, "greedy": GREEDY}[temperature]
    return texts(run(TARGET, PARAMS, ms.NgramDrafter(K), None, ms.Sampling(), 0, **requests))


def accepted_length(state):
    return float(state.statistics.mean_acceptance_length)


def test_greedy_output_is_plain_output():
    """Rows of different lengths, budgets and draft limits, the last one without drafts."""
    state = run(
        TARGET, PARAMS, DraftModelDrafter(OTHER, K), OTHER_PARAMS, ms.Greedy(), K, **GREEDY, depth_limit=[K, K - 1, 0]
    )
    assert texts(state) == plain("greedy")
    assert_has_read_the_text(state.drafter.cache, OTHER, OTHER_PARAMS, state)


def test_sampled_output_is_plain_output():
    params = random_params(TARGET, 1)
    state = run(TARGET, PARAMS, DraftModelDrafter(TARGET, K), params, ms.Sampling(), K, **SAMPLED)
    assert texts(state) == plain("sampled")
    assert 1.1 < accepted_length(state) < K  # some drafts come true, and some do not
    assert_has_read_the_text(state.drafter.cache, TARGET, params, state)


@pytest.mark.parametrize("temperature", ["greedy", "sampled"])
def test_the_target_itself_as_draft_is_always_right(temperature):
    """Each pass emits K + 1 tokens, but for the last of a row whose budget is no multiple of that."""
    requests = {"sampled": SAMPLED, "greedy": GREEDY}[temperature]
    state = run(TARGET, PARAMS, DraftModelDrafter(TARGET, K), PARAMS, ms.Sampling(), K, **requests)
    assert texts(state) == plain(temperature)
    np.testing.assert_array_equal(state.statistics.passes, [-(-budget // (K + 1)) for budget in BUDGETS])
    np.testing.assert_array_equal(state.statistics.histogram[:, K], [budget // (K + 1) for budget in BUDGETS])
    assert_has_read_the_text(state.drafter.cache, TARGET, PARAMS, state)


def test_a_stop_inside_a_window():
    """The draft model's state ends where the text does, not where the drafts did."""
    text = plain("sampled")[2][len(PROMPTS[2]) :]
    at = next(i for i in range(K + 1, len(text)) if text[i] not in text[:i] and i % (K + 1) < K)
    state = run(TARGET, PARAMS, DraftModelDrafter(TARGET, K), PARAMS, ms.Sampling(), K, eos=text[at], **SAMPLED)
    assert int(state.reasons[2]) == ms.StopReason.EOS.value
    assert texts(state)[2] == PROMPTS[2] + text[: at + 1]
    assert_has_read_the_text(state.drafter.cache, TARGET, PARAMS, state)


def test_without_drafts_it_follows():
    state = run(TARGET, PARAMS, DraftModelDrafter(OTHER, K), OTHER_PARAMS, ms.Greedy(), 0, **GREEDY)
    assert texts(state) == plain("greedy")
    assert_has_read_the_text(state.drafter.cache, OTHER, OTHER_PARAMS, state)


def begin(drafter, params):
    return ms.Decoder(TARGET, drafter).init(ms.Weights(PARAMS, params), PROMPTS, max_new=BUDGETS)


@pytest.mark.parametrize(("model", "params"), [(TARGET, PARAMS), (OTHER, OTHER_PARAMS)], ids=["target", "other"])
def test_what_is_pending_is_the_record_of_one_window(model, params):
    """As if the draft model had read root and drafts in one pass; its pool and lengths stay as they are."""
    drafter = DraftModelDrafter(model, K)
    state = begin(drafter, params)
    choose = TokenChoice(state.requests.seeds, state.requests.temperature, ms.Greedy())

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def both(params, before):
        proposal = drafter.propose(params, before, state.tokens, state.lengths, choose, K)
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        draft = Draft(jnp.concatenate([root, proposal.tokens], axis=1), proposal.counts, jnp.arange(len(PROMPTS)))
        return proposal, model.verify(params, draft, before.cache)

    proposal, output = both(params, state.drafter)
    after = proposal.state
    assert jax.tree.structure(after.pending) == jax.tree.structure(output.record)
    jax.tree.map(
        lambda mine, one: np.testing.assert_allclose(mine, one, rtol=1e-5, atol=1e-5), after.pending, output.record
    )
    np.testing.assert_array_equal(proposal.tokens, np.argmax(output.logits[:, :-1], axis=-1))
    jax.tree.map(np.testing.assert_array_equal, after.cache.mamba, state.drafter.cache.mamba)
    np.testing.assert_array_equal(after.cache.lengths, state.drafter.cache.lengths)


class Uncommitted(DraftModelDrafter):
    """Returns what it proposed with."""

    def update(self, params, state, progress):
        return state


class Forgetful(DraftModelDrafter):
    """Forgets the record, and reads what was accepted as if nothing were pending."""

    def update(self, params, state, progress):
        return super().update(params, dataclasses.replace(state, pending=None), progress)


@pytest.mark.parametrize("mutant", [Uncommitted, Forgetful])
def test_a_commit_left_out_is_an_error(mutant):
    drafter, state = mutant(TARGET, K), begin(DraftModelDrafter(TARGET, K), PARAMS)
    with pytest.raises(ValueError, match="still awaits the commit of a verify pass"):
        jax.eval_shape(ms.Decoder(TARGET, drafter).step, ms.Weights(PARAMS, PARAMS), state)


def test_keys_and_values_stay_where_they_lie():
    """Neither proposing nor following copies a key/value buffer of a donated state."""
    drafter, max_len = DraftModelDrafter(TARGET, K), 1013
    requests = begin(drafter, PARAMS).requests
    choose = TokenChoice(requests.seeds, requests.temperature, ms.Greedy())

    def follow(state, params, tokens, lengths, counts):
        proposal = drafter.propose(params, state, tokens, lengths, choose, K)
        read = jnp.concatenate([tokens[:, :1], proposal.tokens], axis=1)
        return drafter.update(params, proposal.state, Progress(read, read, (), counts, ms.ForwardMode.TARGET_VERIFY))

    rows = jnp.ones(len(PROMPTS), jnp.int32)
    state = drafter.init(len(PROMPTS), max_len)
    lowered = jax.jit(follow, donate_argnums=0).lower(state, PARAMS, jnp.zeros((len(rows), 7), jnp.int32), rows, rows)
    program = lowered.compile(QUICKLY)
    assert f",{max_len}," in program.as_text()
    assert re.findall(rf"= \w+\[(?:\d+,)*{max_len}(?:,\d+)*\]\S* copy\(.*", program.as_text()) == []
    assert program.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def test_a_padded_vocabulary_drafts_the_target_s_tokens():
    """The target's weights with two tokens more, one of them the likeliest: never proposed, so all drafts hold."""
    padded = ms.HybridModel.create(dataclasses.replace(TARGET.config, vocab_size=TARGET.vocab_size + 2))

    def grow(mine, leaf):
        changed = [axis for axis, size in enumerate(leaf.shape) if mine.shape[axis] != size]
        if not changed:
            return leaf
        more = jnp.full_like(jax.lax.slice_in_dim(leaf, 0, 1, axis=changed[0]), 9)
        return jnp.concatenate([leaf, more, -more], changed[0])  # one of the two has the greatest logit

    params = jax.tree.map(grow, padded.abstract_params(), PARAMS)
    state = run(TARGET, PARAMS, DraftModelDrafter(padded, K), params, ms.Sampling(), K, **SAMPLED)
    assert texts(state) == plain("sampled")
    np.testing.assert_array_equal(state.statistics.passes, -(-np.array(BUDGETS) // (K + 1)))


def test_errors_name_the_values():
    other = ms.HybridModel.create(dataclasses.replace(DENSE, vocab_size=27))
    drafter, params = DraftModelDrafter(other, K), random_params(other)
    message = "DraftModelDrafter has a vocabulary of 27 tokens, but the target one of 29"
    with pytest.raises(ValueError, match=message):
        ms.Decoder(TARGET, drafter)
    with pytest.raises(ValueError, match=message):
        ms.generate(TARGET, PARAMS, PROMPTS, drafter=drafter, drafter_params=params)
    state = begin(ms.NgramDrafter(K), None)
    with pytest.raises(ValueError, match="max_drafts is 0, expected at least 1"):
        DraftModelDrafter(TARGET, 0)
    with pytest.raises(ValueError, match=r"num_drafts=4, expected 1..3 \(max_drafts\)"):
        DraftModelDrafter(TARGET, K).propose(PARAMS, None, state.tokens, state.lengths, None, K + 1)


def test_a_draft_model_with_a_ring_is_refused():
    replaying = ms.HybridModel.create(DENSE, strategy=ms.CommitStrategy.REPLAY)
    with pytest.raises(ValueError, match=r"a ring of inputs cannot be taken back: create it with CommitStrategy\.SNAP"):
        DraftModelDrafter(replaying, K).init(2, 16)
