"""Streamed text against the whole text: equal in the end, and never ahead of what is decided."""

import itertools

import chex
import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from mamba_spec_jax.speculative import chunks
from mamba_spec_jax.speculative import decoder as decoding
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from mamba_spec_jax.speculative.generate import generate
from mamba_spec_jax.speculative.stop import StopReason
from mamba_spec_jax.speculative.stream import StreamEvent, TextAssembler, generated_texts, stream, text_stops
from mamba_spec_jax.speculative.text import token_bytes

from .toy import ToyModel, random_tables

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Tokens that end inside characters and inside stop strings; together they spell é, è and 日 in several ways.
PIECES = [b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"\xa8", b"\xe6\x97", b"\xa5", b"b\xc3", b"\xa9a"]
ALPHABET = {**{n: chr(n) for n in range(33, 127)}, **{n: chr(n) for n in range(0xAE, 0x100)}}
SPECIAL = "<|end|>"
SPECIAL_ID = len(PIECES)
VOCAB = len(PIECES) + 1
STOPS = ["é", "日", "ab", "ba", " a", "aé", "é b", "b日", SPECIAL]


def spell(piece):
    """As byte-level vocabularies do: printable bytes stand for themselves, the others for characters from 256 on."""
    others = [n for n in range(256) if n not in ALPHABET and n not in range(0xA1, 0xAD)]
    table = {**{n: chr(n) for n in range(0xA1, 0xAD)}, **ALPHABET, **{n: chr(256 + i) for i, n in enumerate(others)}}
    return "".join(table[byte] for byte in piece)


@pytest.fixture(scope="module")
def tokenizer():
    vocab = {spell(piece): token for token, piece in enumerate(PIECES)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    assert token_bytes(tokenizer) == [*PIECES, SPECIAL.encode()]
    return tokenizer


def spelled(tokens):
    return b"".join(PIECES[token] for token in tokens if token != SPECIAL_ID)


def final_text(tokens, stops, held=0):
    """Brute force: the shortest prefix of the bytes that ends in a stop string, less the longest such string.

    It ends in a token past the first `held`.
    """
    data = spelled(tokens)
    encoded = [stop.encode() for stop in stops]
    for end in range(len(spelled(tokens[:held])) + 1, len(data) + 1):
        found = [len(stop) for stop in encoded if data[:end].endswith(stop)]
        if found:
            data = data[: end - max(found)]
            break
    return data.decode(errors="replace")


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=24)
stop_lists = st.lists(st.sampled_from(STOPS), max_size=3, unique=True)


@given(token_lists, st.lists(st.integers(0, 24), max_size=5), stop_lists, st.sampled_from([0, 0, 1, 4, 9]))
@settings(max_examples=400)
def test_pieces_add_up_and_are_never_taken_back(tokens, cuts, stops, held):
    table = [*PIECES, b""]
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    assembler = TextAssembler(table, stops, held)
    final, shown = final_text(tokens, stops, held), ""
    for start, end in itertools.pairwise(bounds):
        shown += assembler.push(tokens[start:end])
        assert final.startswith(shown)
        if not stops:  # without stop strings only an unfinished character may be missing
            whole = b"".join(table[token] for token in tokens[:end]).decode(errors="replace")
            assert whole.startswith(shown)
            assert len(whole) - len(shown) <= 1
    assert shown + assembler.finish() == final
    assert assembler.push([0, 0]) == "" or not assembler.stopped


MODEL = ToyModel(VOCAB)
LOGITS = random_tables(seed=5, vocab=VOCAB, floor=0.01)[0]
PROMPTS = [[0, 1, 0, 1], [3], [7, 8, 2]]
OPTIONS = {"temperature": 1, "max_new": [40, 7, 64], "seeds": 3, "chunk_steps": 2}


def drain(events, rows):
    """The pieces of each row, and the generation."""
    pieces = [[] for _ in range(rows)]
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            return pieces, end.value
        assert isinstance(event, StreamEvent)
        assert event.text
        pieces[event.row].append(event.text)


@pytest.mark.parametrize(
    ("stops", "num_drafts"),
    [([], 3), (["é"], 0), (["é"], 3), (["a日", "éa", " ab"], 3), (["a日", "éa", " ab"], "auto")],
)
def test_stream_equals_generate(tokenizer, stops, num_drafts):
    pieces, streamed = drain(
        stream(
            MODEL,
            LOGITS,
            PROMPTS,
            tokenizer,
            stop_strings=stops,
            eos_ids=[SPECIAL_ID],
            num_drafts=num_drafts,
            **OPTIONS,
        ),
        rows=len(PROMPTS),
    )
    whole = generate(
        MODEL,
        LOGITS,
        PROMPTS,
        num_drafts=num_drafts,
        stops=text_stops(tokenizer, VOCAB, [SPECIAL_ID], stops),
        **OPTIONS,
    )
    assert streamed.tokens == whole.tokens
    assert streamed.reasons == whole.reasons
    expected = [final_text(tokens, stops) for tokens in whole.tokens]
    assert generated_texts(whole, tokenizer, stops) == expected
    assert ["".join(row) for row in pieces] == expected
    assert not any(stop in text for text in expected for stop in stops)
    assert max(map(len, pieces)) > 1  # it did arrive in pieces


def test_rows_end_where_the_shown_text_does(tokenizer):
    """A stop string split across tokens, and one that spells a special token, stop the device and the text alike."""
    rows, stops = 24, ["é", SPECIAL]
    options = {"num_drafts": 3, "temperature": 1, "max_new": 24}
    pieces, generation = drain(stream(MODEL, LOGITS, [[0]] * rows, tokenizer, stop_strings=stops, **options), rows)
    splits = 0
    for tokens, reason, row in zip(generation.tokens, generation.reasons, pieces, strict=True):
        visible = b"".join(PIECES[token] for token in tokens if token != SPECIAL_ID)
        assert ("é".encode() in visible) == (reason is StopReason.STOP_STRING)
        assert (tokens[-1] == SPECIAL_ID) == (reason is StopReason.EOS)
        assert SPECIAL_ID not in tokens[:-1]
        assert "".join(row) == final_text(tokens, stops)
        assert "é" not in "".join(row)
        splits += reason is StopReason.STOP_STRING and PIECES[tokens[-1]] == b"\xa9"
    assert set(generation.reasons) == {StopReason.STOP_STRING, StopReason.EOS, StopReason.MAX_NEW}
    assert splits


@pytest.mark.parametrize("drafter", [NgramDrafter(3), NgramTreeDrafter(6)])
def test_min_new_holds_back_stop_strings_as_it_does_end_tokens(tokenizer, drafter):
    """On chains and trees: no row ends within its `min_new` tokens, and the text shown is cut where the row ended."""
    prompts, stops, held = [[0, 1]] * 24, ["a", "é"], [0, 3, 9] * 8
    options = {"max_new": 24, "min_new": held, "temperature": 1, "seeds": 3}
    pieces, generation = drain(
        stream(
            MODEL,
            LOGITS,
            prompts,
            tokenizer,
            stop_strings=stops,
            eos_ids=[SPECIAL_ID],
            drafter=drafter,
            **options,
        ),
        len(prompts),
    )
    plain = generate(
        MODEL, LOGITS, prompts, num_drafts=0, stops=text_stops(tokenizer, VOCAB, [SPECIAL_ID], stops), **options
    )
    assert generation.tokens == plain.tokens
    assert generation.reasons == plain.reasons
    texts, kept = [], 0
    for tokens, reason, least in zip(generation.tokens, generation.reasons, held, strict=True):
        assert len(tokens) > least or reason is StopReason.MAX_NEW
        at = next(
            (n for n in range(least, len(tokens)) if tokens[n] == SPECIAL_ID or completes(tokens, n, stops)), None
        )
        assert at in (None, len(tokens) - 1)
        assert SPECIAL_ID not in tokens[:least]
        kept += any(completes(tokens, n, stops) for n in range(least))
        texts.append(final_text(tokens, stops, least))
    assert kept > 8, "hardly any stop string was held back: nothing was tested"
    assert generated_texts(generation, tokenizer, stops) == texts
    assert ["".join(row) for row in pieces] == texts


def completes(tokens, at, stops):
    """Whether a stop string ends in token `at`."""
    before, text = len(spelled(tokens[:at])), spelled(tokens[: at + 1])
    return any(text[:end].endswith(stop.encode()) for end in range(before + 1, len(text) + 1) for stop in stops)


def test_requests_that_differ_in_every_option_share_one_program(tokenizer, monkeypatch):
    """Greedy rows beside drawn ones, with and without each filter, stop string and end token: traced once."""
    chunk = chex.assert_max_traces(n=1)(chunks._chunk)
    counted = jax.jit(chunk, static_argnums=(3, 4), donate_argnums=2)
    monkeypatch.setattr(chunks, "_run_chunk", counted)
    prefill = chex.assert_max_traces(n=1)(decoding.Decoder.prefill)
    monkeypatch.setattr(decoding, "_prefill", jax.jit(prefill, donate_argnums=2))
    rng = np.random.default_rng(0)
    seen = set()
    for request in range(20):
        # The longest prompt and the budgets stay within their sizes.
        prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, rng.integers(1, 6), rng.integers(1, 6))]
        stops = [STOPS[n] * int(rng.integers(1, 4)) for n in rng.permutation(len(STOPS) - 1)[: request % 5]]
        ends = rng.permutation(VOCAB)[: request % 4].tolist()
        options = {
            "max_new": rng.integers(30, 58, 3).tolist(),
            "min_new": rng.integers(0, 30, 3).tolist() if stops or ends else 0,
            "temperature": [0, *rng.uniform(0.2, 2, 2)],
            "top_k": int(rng.integers(1, VOCAB)) if request % 2 else [0, 3, 0],
            "top_p": [float(rng.uniform(0.3, 1)), 1, 0.9] if request % 3 else 1.0,
            "min_p": float(rng.uniform(0, 0.2)) if request % 4 else 0.0,
            "seeds": int(rng.integers(2**31)),
            "depth_limit": rng.integers(0, 4, 3).tolist() if request % 5 else None,
            "num_drafts": 3,
            "chunk_steps": 4,
        }
        whole = generate(MODEL, LOGITS, prompts, stops=text_stops(tokenizer, VOCAB, ends, stops), **options)
        events = stream(MODEL, LOGITS, prompts, tokenizer, stop_strings=stops, eos_ids=ends, **options)
        _, streamed = drain(events, rows=3)
        assert streamed.tokens == whole.tokens
        seen |= set(whole.reasons)
    assert seen == {StopReason.STOP_STRING, StopReason.EOS, StopReason.MAX_NEW}
    assert counted._cache_size() == 1


def test_special_tokens_do_not_break_a_stop_string(tokenizer):
    """They have no text, so a stop string reads on across them, on the device as in the text."""
    stops = text_stops(tokenizer, VOCAB, [], ["ab"])
    tokens = np.array([[0, SPECIAL_ID, 1, 3]], np.int32)
    completes, _ = jax.jit(stops.automaton.advance)(np.zeros(1, np.int32), tokens, np.array([4], np.int32))
    assert completes.tolist() == [[False, False, True, False]]
    assembler = TextAssembler([*PIECES, b""], ["ab"])
    assert assembler.push(tokens[0].tolist()) + assembler.finish() == ""


def test_a_tokenizer_without_bytes_is_refused(tokenizer):
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decoder is Metaspace, expected ByteLevel"):
        stream(MODEL, LOGITS, [[0]], other)
    with pytest.raises(ValueError, match="came as the single 'ab', expected a list"):
        stream(MODEL, LOGITS, [[0]], tokenizer, stop_strings="ab")
    with pytest.raises(ValueError, match="the tokenizer is None, expected a tokenizers"):
        stream(MODEL, LOGITS, [[0]], None)
    with pytest.raises(ValueError, match="eos_ids=5, expected a list of token ids"):
        stream(MODEL, LOGITS, [[0]], tokenizer, eos_ids=5)
