"""The step against its definition: every row, pass by pass, as plain Python computes it."""

import dataclasses
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mamba_spec_jax as ms
from mamba_spec_jax.speculative import chunks
from mamba_spec_jax.speculative.requests import Requests
from mamba_spec_jax.speculative.state import Statistics

from ..tiny import DENSE, random_params
from .toy import ToyModel

# What is checked is the loop, not the optimiser, whose passes take most of the time of compiling so small a model.
pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ROWS, SLOTS, DRAFTS, LENGTH = 6, 4, 6, 3, 24
MOST_NEW = 12
MODEL = ToyModel(VOCAB)
LOGITS = np.random.default_rng(0).normal(size=(VOCAB + 1, VOCAB, VOCAB)).astype(np.float32)
TOKEN_BYTES = [bytes([97 + token]) for token in range(VOCAB)]


@dataclasses.dataclass(frozen=True)
class Foresight:
    """Proposes what its state says: tokens `[B, M]` by position, and how many when a row is so long `[B, M]`."""

    max_drafts: int = DRAFTS
    hidden_layers = ()
    proposes_trees = False

    def init(self, batch, max_len):
        return jnp.zeros((batch, max_len), jnp.int32), jnp.zeros((batch, max_len), jnp.int32)

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        foreseen, counts = state
        at = jnp.minimum(lengths[:, None] + jnp.arange(num_drafts), foreseen.shape[1] - 1)
        count = jnp.take_along_axis(counts, lengths[:, None], axis=1)[:, 0]
        return ms.Proposal(jnp.take_along_axis(foreseen, at, axis=1), count, state)

    def update(self, params, state, progress):
        return state


@dataclasses.dataclass
class Row:
    """What one row asks for, and what its drafter will say; `foreseen` and `counts` are by position."""

    slot: int
    prompt: list[int]
    max_new: int
    min_new: int
    depth_limit: int
    wrong: list[int]
    counts: list[int]
    foreseen: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Expected:
    tokens: list[int]
    logprobs: list[float]
    reason: ms.StopReason
    passes: int
    drafted: int
    histogram: list[int]


def spelled(tokens):
    return b"".join(TOKEN_BYTES[token] for token in tokens)


def simulate(row, eos, stop_strings, drafts=True):
    """The definition: a pass walks along the drafts that are the target's own choice, and stops where the row does."""
    text = list(row.prompt)
    out = Expected([], [], ms.StopReason.NONE if row.max_new else ms.StopReason.MAX_NEW, 0, 0, [0] * (DRAFTS + 1))
    while out.reason is ms.StopReason.NONE and row.slot >= 0:
        limit = min(row.depth_limit, row.max_new - len(out.tokens) - 1, row.counts[len(text)]) if drafts else 0
        window = row.foreseen[len(text) : len(text) + limit]
        window = list(itertools.takewhile(lambda token: token < VOCAB, window))  # what follows can't be accepted
        emitted = 0
        for draft in [*window, None]:
            logits = LOGITS[text[-2] + 1 if len(text) > 1 else 0, text[-1]]
            allowed = [t for t in range(VOCAB) if t not in eos or len(out.tokens) >= row.min_new]
            token = max(allowed, key=lambda t: logits[t])
            text.append(token)
            out.tokens.append(token)
            out.logprobs.append(float(logits[token] - np.log(np.exp(logits).sum())))
            emitted += 1
            if token in eos:
                out.reason = ms.StopReason.EOS
            elif len(out.tokens) > row.min_new and any(spelled(out.tokens).endswith(stop) for stop in stop_strings):
                out.reason = ms.StopReason.STOP_STRING
            elif len(out.tokens) == row.max_new:
                out.reason = ms.StopReason.MAX_NEW
            if out.reason is not ms.StopReason.NONE or draft != token:
                break
        out.passes += 1
        out.drafted += len(window)
        out.histogram[emitted - 1] += 1
    return out


def build_state(rows, stops):
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    for r, row in enumerate(rows):
        tokens[r, : len(row.prompt)] = row.prompt
    lengths = np.asarray([len(row.prompt) for row in rows], np.int32)
    cache = MODEL.init_cache(SLOTS, LENGTH)
    ssm, committed = np.array(cache.mamba.ssm), np.zeros(SLOTS, np.int32)
    for row in rows:
        if row.slot >= 0:
            ssm[0, row.slot] = row.prompt[-2] + 1 if len(row.prompt) > 1 else 0
            committed[row.slot] = len(row.prompt) - 1
    cache = dataclasses.replace(
        cache, mamba=dataclasses.replace(cache.mamba, ssm=jnp.asarray(ssm)), lengths=jnp.asarray(committed)
    )

    def of_rows(name, dtype=np.int32):
        return jnp.asarray([getattr(row, name) for row in rows], dtype)

    def zeros(dtype=jnp.int32):
        return jnp.zeros((ROWS,), dtype)

    return ms.DecodeState(
        cache=cache,
        drafter=(of_rows("foreseen"), of_rows("counts")),
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        prompt_lengths=jnp.asarray(lengths),
        reasons=jnp.asarray([0 if row.max_new else ms.StopReason.MAX_NEW.value for row in rows], jnp.int32),
        stop_states=zeros(),
        requests=Requests(
            slots=of_rows("slot"),
            max_new=of_rows("max_new"),
            min_new=of_rows("min_new"),
            depth_limit=of_rows("depth_limit"),
            seeds=zeros(jnp.uint32),
            temperature=jnp.ones((ROWS,), jnp.float32),
            filters=ms.Filters.create(ROWS),
        ),
        stops=stops,
        statistics=Statistics.create(ROWS, DRAFTS),
        logprobs=jnp.zeros((ROWS, LENGTH), jnp.float32),
    )


@functools.partial(jax.jit, donate_argnums=1)
@chex.assert_max_traces(n=1)
def step(weights, state):
    return ms.Decoder(MODEL, Foresight()).step(weights, state)


tokens_of = functools.partial(st.lists, st.integers(0, VOCAB - 1))


@st.composite
def rows_of(draw):
    slots = draw(st.permutations([-1, *range(SLOTS)]))
    rows = []
    for slot in slots[:ROWS]:
        max_new = draw(st.integers(0, MOST_NEW))
        rows.append(
            Row(
                slot=slot,
                prompt=draw(tokens_of(min_size=1, max_size=LENGTH // 4)),
                max_new=max_new,
                min_new=draw(st.integers(0, max_new)),
                depth_limit=draw(st.integers(0, DRAFTS)),
                # Mostly right, sometimes another token, sometimes none of the vocabulary's.
                wrong=draw(st.lists(st.sampled_from([0, 0, 0, 1, VOCAB]), min_size=LENGTH, max_size=LENGTH)),
                counts=draw(st.lists(st.sampled_from([DRAFTS, DRAFTS, 1, 0]), min_size=LENGTH, max_size=LENGTH)),
            )
        )
    return rows


@settings(max_examples=60)
@given(
    rows=rows_of(),
    eos=st.tuples(st.integers(0, 3 * VOCAB), st.integers(0, 3 * VOCAB)),
    stop_strings=st.tuples(st.sampled_from(["ab", "ad", "ae"]), st.sampled_from(["ba", "bb", "bf"])),
)
def test_rows_as_their_definition(rows, eos, stop_strings):
    stop_bytes = [text.encode() for text in stop_strings]
    for row in rows:
        right = simulate(row, eos, stop_bytes, drafts=False).tokens
        foreseen = (row.prompt + right + [0] * LENGTH)[:LENGTH]
        row.foreseen = [
            token if not off else (token + 1) % VOCAB if off == 1 else VOCAB
            for token, off in zip(foreseen, row.wrong, strict=True)
        ]
    stops = ms.StopConditions.create(eos, stop_strings, TOKEN_BYTES)
    state = build_state(rows, stops)
    for _ in range(MOST_NEW):
        state = step(ms.Weights(LOGITS), state)

    assert not np.any(state.active)
    states = np.asarray(state.cache.mamba.ssm)[0, :, 0, 0, 0]
    for r, row in enumerate(rows):
        expected = simulate(row, eos, stop_bytes)
        text = row.prompt + expected.tokens
        assert int(state.lengths[r]) == len(text)
        padding = [0] * (LENGTH - len(text))
        np.testing.assert_array_equal(state.tokens[r], text + padding)
        np.testing.assert_allclose(state.logprobs[r], [0] * len(row.prompt) + expected.logprobs + padding, atol=1e-5)
        assert int(state.reasons[r]) == expected.reason.value
        assert int(state.statistics.passes[r]) == expected.passes
        assert int(state.statistics.drafted[r]) == expected.drafted
        np.testing.assert_array_equal(state.statistics.histogram[r], expected.histogram)
        assert int(state.statistics.emitted[r]) == len(expected.tokens)
        if row.slot >= 0:  # all but the last token are committed, and no more
            assert int(state.cache.lengths[row.slot]) == len(text) - 1
            assert int(states[row.slot]) == (text[-2] + 1 if len(text) > 1 else 0)
    unused = sorted(set(range(SLOTS)) - {row.slot for row in rows})
    np.testing.assert_array_equal(states[unused], 0)
    np.testing.assert_array_equal(np.asarray(state.cache.lengths)[unused], 0)


PROMPTS = [[3, 9, 4, 3, 9, 4, 3], [5, 5], [11]]
HYBRID = ms.HybridModel.create(DENSE)
DECODER = ms.Decoder(HYBRID, ms.NgramDrafter(DRAFTS), ms.Sampling())
STEPS = 20


@jax.jit
def run(params, state):
    return DECODER.steps(ms.Weights(params), state, STEPS)


def begin(prompts, **requests):
    return DECODER.init(ms.Weights(random_params(HYBRID)), prompts, logprobs=True, **requests)


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_finished_rows_change_nothing():
    """Not a byte of the state: keys and values included."""
    state = run(random_params(HYBRID), begin(PROMPTS, max_new=[STEPS, 0, 4], temperature=0.0))
    assert not np.any(state.active)
    np.testing.assert_array_equal(state.new_tokens, [STEPS, 0, 4])
    assert_same(run(random_params(HYBRID), state), state)


def test_draws_depend_on_the_request_alone():
    """Row, slot and company change no token; in a batch of the same size they change no bit."""
    params, seeds = random_params(HYBRID), [7, 8, 9]
    together = run(params, begin(PROMPTS, seeds=seeds, max_new=STEPS, temperature=1.5))
    texts = [np.asarray(together.tokens)[row, : together.lengths[row]] for row in range(3)]
    assert len({tuple(text[-STEPS:].tolist()) for text in texts}) == 3

    order = np.asarray([2, 0, 1])
    prompts, moved_seeds = [PROMPTS[row] for row in order], [seeds[row] for row in order]
    moved = run(params, begin(prompts, seeds=moved_seeds, max_new=STEPS, temperature=1.5))
    for name in ("tokens", "lengths", "logprobs", "statistics"):
        assert_same(getattr(moved, name), jax.tree.map(lambda leaf: np.asarray(leaf)[order], getattr(together, name)))
    assert_same(moved.cache.mamba, jax.tree.map(lambda pool: np.asarray(pool)[:, order], together.cache.mamba))

    for row, prompt in enumerate(PROMPTS):
        alone = begin([prompt], seeds=seeds[row : row + 1], max_new=STEPS, temperature=1.5)
        tokens = np.asarray(run(params, alone).tokens)[0]
        np.testing.assert_array_equal(tokens[: len(texts[row])], texts[row])
        other = run(params, begin([prompt], seeds=[99], max_new=STEPS, temperature=1.5))
        assert np.any(np.asarray(other.tokens)[0, : len(texts[row])] != texts[row])


def test_steps_under_vmap():
    """A leading axis of whole states, as for an ensemble of loops, changes no bit of any."""
    states = [begin(PROMPTS, max_new=STEPS, seeds=seed, temperature=1.0) for seed in (3, 4)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    together = jax.vmap(run, in_axes=(None, 0))(random_params(HYBRID), stacked)
    for i, state in enumerate(states):
        assert_same(jax.tree.map(lambda leaf: np.asarray(leaf)[i], together), run(random_params(HYBRID), state))  # noqa: B023


def whole_buffer_copies(text, sizes):
    """Copies in a program of arrays with one of these dimensions."""
    return re.findall(rf"= \w+\[(?:\d+,)*(?:{'|'.join(map(str, sizes))})(?:,\d+)*\]\S* copy\(.*", text)


@pytest.mark.parametrize("num_drafts", [0, DRAFTS])
def test_a_donated_state_stays_where_it_lies(num_drafts):
    """A chunk of steps neither copies a pool or a key/value buffer nor has room for one."""
    slots, max_len = 1013, 37
    state = dataclasses.replace(begin(PROMPTS, max_new=20), cache=HYBRID.init_cache(slots, max_len))
    decoder = dataclasses.replace(DECODER, method=ms.Greedy())
    compiled = chunks._run_chunk.lower(decoder, ms.Weights(random_params(HYBRID)), state, num_drafts, 4).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert f",{slots}," in text
    assert whole_buffer_copies(text, [slots]) == []
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    smallest = min(leaf.nbytes for leaf in jax.tree.leaves((state.cache.mamba, state.cache.kv)))
    assert memory.temp_size_in_bytes < smallest


def test_a_copy_would_be_seen():
    pool = jnp.zeros((3, 1013, 5))
    text = jax.jit(lambda pool: (pool.at[0, 1].set(1), pool + 1), donate_argnums=0).lower(pool).compile().as_text()
    assert whole_buffer_copies(text, [1013]) != []


class WithoutRecord(ToyModel):
    def verify(self, params, draft, cache):
        return dataclasses.replace(super().verify(params, draft, cache), record=None)


class TooFew(Foresight):
    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        proposal = super().propose(params, state, tokens, lengths, choose, num_drafts)
        return dataclasses.replace(proposal, tokens=proposal.tokens[:, 1:])


@pytest.mark.parametrize(
    ("model", "drafter", "message"),
    [
        (WithoutRecord(VOCAB), Foresight(), "WithoutRecord.verify returned no record, expected what its commit needs"),
        (MODEL, TooFew(), r"TooFew.propose returned tokens int32\[4, 2\], expected int32\[4, 3\]"),
    ],
)
def test_what_a_model_or_drafter_leaves_out_is_named(model, drafter, message):
    decoder, weights = ms.Decoder(model, drafter), ms.Weights(LOGITS)
    state = decoder.init(weights, [[1]] * ROWS, max_new=4)
    with pytest.raises(ValueError, match=message):
        decoder.step(weights, state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_drafts": -1}, r"num_drafts is -1, expected 0\.\.3, what Foresight can propose"),
        ({"num_drafts": 4}, r"num_drafts is 4, expected 0\.\.3, what Foresight can propose"),
        ({"num_drafts": 2.0}, r"num_drafts is 2\.0, expected 0\.\.3"),
        ({"num_drafts": True}, r"num_drafts is True, expected 0\.\.3"),
        ({"num_drafts": "auto"}, r"num_drafts is 'auto', expected 0\.\.3"),
        ({"method": None}, r"method is None, expected Greedy\(\) or Sampling\(\)"),
        ({"method": ms.Sampling}, r"method is <class .*Sampling'>, expected Greedy\(\) or Sampling\(\)"),
    ],
)
def test_what_a_decoder_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ms.Decoder(MODEL, Foresight(), **options)


def test_a_temperature_needs_a_method_that_draws():
    weights, requests = ms.Weights(LOGITS), {"max_new": 4, "temperature": [0.0] * (ROWS - 1) + [0.5]}
    with pytest.raises(ValueError, match=r"temperature is \[.*0\.5\], but the decoder's method is Greedy\(\)"):
        ms.Decoder(MODEL, Foresight()).init(weights, [[1]] * ROWS, **requests)
    ms.Decoder(MODEL, Foresight(), ms.Sampling()).init(weights, [[1]] * ROWS, **requests)
