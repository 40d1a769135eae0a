"""Stopping on the device against a brute-force search in the bytes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.speculative.acceptance import AcceptResult
from mamba_spec_jax.speculative.stop import StopAutomaton, StopConditions, StopReason, limit_accept
from mamba_spec_jax.speculative.text import cut_at_stop

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, V = 3, 4, 6
STREAM = 12
# Few letters, so that stop strings overlap, repeat and end inside tokens.
letters = st.sampled_from([b"a", b"b"])
stop_lists = st.lists(st.lists(letters, min_size=1, max_size=4).map(b"".join), min_size=1, max_size=3)
tables = st.lists(st.lists(letters, max_size=3).map(b"".join), min_size=V, max_size=V)
streams = st.lists(st.lists(st.integers(0, V - 1), min_size=STREAM, max_size=STREAM), min_size=B, max_size=B)

jit_limit = jax.jit(limit_accept)


def completions(tokens, table, stops):
    """Whether each token completes a stop string, matches before it disregarded."""
    text, found = b"", []
    for token in tokens:
        before, text = len(text), text + table[token]
        ends = range(before + 1, len(text) + 1)
        found.append(any(text[:end].endswith(stop) for end in ends for stop in stops))
    return found


def first_stop(tokens, table, stops, held=0):
    """Index of the first token from `held` on that completes a stop string, None for none."""
    return next((at for at, found in enumerate(completions(tokens, table, stops)) if found and at >= held), None)


@jax.jit
@chex.assert_max_traces(n=4)  # windows of T and single rows, of two vocabularies: no stop string makes a fifth
def advance(automaton, states, tokens, lengths):
    return automaton.advance(states, tokens, lengths)


@given(stops=stop_lists, table=tables, streams=streams, data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_automaton_finds_what_a_search_finds(stops, table, streams, data):
    """Token streams read in windows of uneven length, zero included, each row at its own pace."""
    automaton = StopAutomaton.build(stops, table)
    states = jnp.zeros((B,), jnp.int32)
    read = np.zeros(B, int)
    found = [[] for _ in range(B)]
    while read.min() < STREAM:
        lengths = np.array(data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
        if lengths.max() == 0:
            lengths[:] = T
        lengths = np.minimum(lengths, STREAM - read)
        if lengths.max() == 0:
            lengths = np.minimum(T, STREAM - read)
        window = np.full((B, T), V - 1, np.int32)
        for b in range(B):
            window[b, : lengths[b]] = streams[b][read[b] : read[b] + lengths[b]]
        completes, states = advance(automaton, states, window, lengths)
        for b in range(B):
            found[b] += completes[b, : lengths[b]].tolist()
            assert not completes[b, lengths[b] :].any()
        read += lengths
    assert found == [completions(tokens, table, stops) for tokens in streams]
    # Where the device stops, the host finds the text to cut, and not a token earlier.
    for tokens in streams:
        at = first_stop(tokens, table, stops)
        text = b"".join(table[token] for token in tokens[: STREAM if at is None else at])
        assert cut_at_stop(text, stops) == (text, False)
        if at is not None:
            kept, cut = cut_at_stop(text + table[tokens[at]], stops)
            assert cut
            assert not any(stop in kept for stop in stops)


def test_stop_string_inside_and_across_tokens():
    table = [b"xx", b"<e", b"nd", b">y", b"a<end>b", "é".encode()[:1], "é".encode()[1:]]
    automaton = StopAutomaton.build(["<end>", "é"], table)
    assert automaton.transitions.shape == (64, 512)
    assert automaton.nbytes == (7 + 64 * 512) * 4
    for tokens, expected in (
        ([0, 1, 2, 3], [3]),
        ([4, 0, 4, 0], [0, 2]),
        ([1, 1, 2, 3], [3]),
        ([1, 2, 0, 3], []),
        ([0, 5, 6, 0], [2]),
        ([6, 5, 5, 0], []),
        ([1, 2, -1, 3], []),
        ([1, 2, 99, 3], []),
    ):
        completes, _ = advance(automaton, np.zeros(1, np.int32), np.array([tokens], np.int32), np.array([4]))
        assert np.flatnonzero(completes[0]).tolist() == expected, tokens


def result_of(tokens, lengths, logprobs=True):
    lengths = np.asarray(lengths, np.int32)
    emitted = np.arange(T) < lengths[:, None]
    return AcceptResult(
        tokens=np.where(emitted, np.asarray(tokens, np.int32), -1),
        accept_lens=lengths,
        last_correct_step_indices=lengths - 1,
        logprobs=np.where(emitted, np.float32(-1.5), np.float32(0)) if logprobs else None,
    )


@given(
    stops=stop_lists,
    table=tables,
    tokens=st.lists(st.lists(st.integers(0, V - 1), min_size=T, max_size=T), min_size=B, max_size=B),
    lengths=st.lists(st.integers(0, T), min_size=B, max_size=B),
    remaining=st.lists(st.integers(0, T + 2), min_size=B, max_size=B),
    eos=st.sets(st.integers(0, V), max_size=3),
    to_come=st.lists(st.integers(-2, T), min_size=B, max_size=B),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rows_are_cut_at_their_first_stop(stops, table, tokens, lengths, remaining, eos, to_come):
    conditions = StopConditions.create(eos, stops, table)
    result = result_of(tokens, lengths)
    limits = jnp.array(remaining, jnp.int32), jnp.array(to_come, jnp.int32)
    outcome = jit_limit(result, conditions, jnp.zeros(B, jnp.int32), *limits)
    for b in range(B):
        window = tokens[b][: lengths[b]]
        matched = first_stop(window, table, stops, to_come[b])
        reason, kept = StopReason.NONE, len(window)
        for index, token in enumerate(window):
            if index >= remaining[b]:
                reason, kept = StopReason.MAX_NEW, 0
            elif token in eos and index >= to_come[b]:
                reason, kept = StopReason.EOS, index + 1
            elif index == matched:
                reason, kept = StopReason.STOP_STRING, index + 1
            elif index + 1 == remaining[b]:
                reason, kept = StopReason.MAX_NEW, index + 1
            if reason != StopReason.NONE:
                break
        assert (outcome.reasons[b], outcome.result.accept_lens[b]) == (reason, kept)
        assert outcome.finished[b] == (reason != StopReason.NONE)
        assert outcome.result.last_correct_step_indices[b] == kept - 1
        assert outcome.result.tokens[b].tolist() == window[:kept] + [-1] * (T - kept)
        assert outcome.result.logprobs[b].tolist() == [-1.5] * kept + [0] * (T - kept)


def test_partial_match_carries_over_a_step_and_rows_without_tokens_keep_it():
    conditions = StopConditions.create((), ["abc"], [b"a", b"b", b"c"])
    states, reasons = jnp.zeros(2, jnp.int32), []
    for tokens, lengths in (([2, 0, 1, 2], [3, 3]), ([2, 2, 2, 2], [0, 1]), ([2, 2, 2, 2], [2, 0])):
        outcome = jit_limit(
            result_of([tokens] * 2, lengths, False), conditions, states, np.full(2, 100), np.zeros(2, int)
        )
        states = outcome.states
        reasons.append(outcome.reasons.tolist())
    assert reasons == [
        [StopReason.NONE, StopReason.NONE],
        [StopReason.NONE, StopReason.STOP_STRING],
        [StopReason.STOP_STRING, StopReason.NONE],
    ]
    assert outcome.result.accept_lens.tolist() == [1, 0]
    assert outcome.result.logprobs is None


def test_without_conditions_only_the_budget_stops():
    conditions = StopConditions.create()
    outcome = jit_limit(
        result_of([[1, 2, 3, 4]] * 3, [4, 4, 4]),
        conditions,
        jnp.zeros(3, jnp.int32),
        np.array([9, 4, 2]),
        np.zeros(3, int),
    )
    assert outcome.reasons.tolist() == [StopReason.NONE, StopReason.MAX_NEW, StopReason.MAX_NEW]
    assert outcome.result.accept_lens.tolist() == [4, 4, 2]


def test_end_of_sequence_is_forbidden_until_min_new():
    conditions = StopConditions.create((1, 4))
    forbidden = conditions.forbidden(6, jnp.array([2, 0, 1]), jnp.arange(3))
    expected = np.zeros((3, 3, 6), bool)
    expected[0, :2, [1, 4]] = True  # its third token may be the last
    expected[2, :1, [1, 4]] = True
    np.testing.assert_array_equal(forbidden, expected)
    assert not StopConditions.create().forbidden(6, jnp.array([9]), jnp.arange(3)).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            functools.partial(StopAutomaton.build, ["abcd", "xy"], [b"a"] * 1000, max_bytes=9_000),
            r"2 stop strings need a table of 5 states x 1000 tokens x 2 bytes = 10,000 bytes, expected at most "
            r"max_bytes=9,000: use fewer or shorter ones",
        ),
        (functools.partial(StopAutomaton.build, ["ab", ""], [b"a"]), r"\['ab', ''\] is empty"),
        (functools.partial(StopAutomaton.build, "ab", [b"a"]), "stop strings came as the single 'ab', expected a list"),
        (functools.partial(StopConditions.create, (), ["ab"]), r"stop strings \['ab'\] came without token_bytes"),
        (functools.partial(StopConditions.create, (2, -1)), r"eos_ids=\(2, -1\), expected token ids of at least 0"),
        (functools.partial(StopConditions.create, 5), r"eos_ids=5, expected a list of token ids: \[2\]"),
        (functools.partial(StopConditions.create, "</s>"), r"eos_ids='</s>', expected a list of token ids"),
        (functools.partial(StopConditions.create, [2, 1.0]), r"eos_ids=\[2, 1.0\], expected token ids, which are"),
        (functools.partial(StopConditions.create, [True]), r"eos_ids=\[True\], expected token ids, which are"),
        (functools.partial(StopConditions.create, None), "eos_ids=None, expected a list of token ids"),
        (functools.partial(StopConditions.create, (), 5), "stop strings are 5, expected a list of text"),
        (
            functools.partial(StopConditions.create, (), ["a", 5]),
            r"stop strings are \['a', 5\], expected a list of text",
        ),
        (functools.partial(StopConditions.create, (), ["a\udcff"]), "a stop string is not text: its character 1 is no"),
        (functools.partial(StopConditions.create, (), ["a"], "abc"), "token_bytes is no list of bytes objects"),
        (functools.partial(StopConditions.create, (), ["a"], ["abc"]), "token_bytes is no list of bytes objects"),
        (
            functools.partial(StopConditions.create([7]).for_vocabulary, 7),
            r"eos_ids contain 7, expected 0..6: the model has no such token",
        ),
        (
            functools.partial(StopConditions.create((), ["a"], [b"a"] * 9).for_vocabulary, 7),
            "stop strings were compiled for 9 tokens, but the model has 7",
        ),
    ],
)
def test_errors_name_the_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()
