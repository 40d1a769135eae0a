"""Streamed text against the whole text: equal in the end, and never ahead of what is decided."""

import itertools

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from mamba_spec_jax.speculative.generate import generate
from mamba_spec_jax.speculative.sampling import Sampling
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


def final_text(tokens, stops):
    """Brute force: the shortest prefix of the bytes that ends in a stop string, less the longest such string."""
    data = b"".join(PIECES[token] for token in tokens if token != SPECIAL_ID)
    encoded = [stop.encode() for stop in stops]
    for end in range(len(data) + 1):
        found = [len(stop) for stop in encoded if data[:end].endswith(stop)]
        if found:
            data = data[: end - max(found)]
            break
    return data.decode(errors="replace")


token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=24)
stop_lists = st.lists(st.sampled_from(STOPS), max_size=3, unique=True)


@given(token_lists, st.lists(st.integers(0, 24), max_size=5), stop_lists)
@settings(max_examples=400)
def test_pieces_add_up_and_are_never_taken_back(tokens, cuts, stops):
    table = [*PIECES, b""]
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    assembler = TextAssembler(table, stops)
    final, shown = final_text(tokens, stops), ""
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
OPTIONS = {"method": Sampling(), "max_new": [40, 7, 64], "seeds": 3, "chunk_steps": 2}


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
    ("stops", "depth"),
    [([], 3), (["é"], 0), (["é"], 3), (["a日", "éa", " ab"], 3), (["a日", "éa", " ab"], "auto")],
)
def test_stream_equals_generate(tokenizer, stops, depth):
    pieces, streamed = drain(
        stream(MODEL, LOGITS, PROMPTS, tokenizer, stop_strings=stops, eos_ids=[SPECIAL_ID], depth=depth, **OPTIONS),
        rows=len(PROMPTS),
    )
    whole = generate(
        MODEL, LOGITS, PROMPTS, depth=depth, stops=text_stops(tokenizer, VOCAB, [SPECIAL_ID], stops), **OPTIONS
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
    options = {"depth": 3, "method": Sampling(), "max_new": 24}
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


def test_special_tokens_do_not_break_a_stop_string(tokenizer):
    """They have no text, so a stop string reads on across them, on the device as in the text."""
    stops = text_stops(tokenizer, VOCAB, [], ["ab"])
    tokens = np.array([[0, SPECIAL_ID, 1, 3]], np.int32)
    first, _ = jax.jit(stops.automaton.advance)(stops.initial_states(1), tokens, np.array([4], np.int32))
    assert first.tolist() == [2]
    assembler = TextAssembler([*PIECES, b""], ["ab"])
    assert assembler.push(tokens[0].tolist()) + assembler.finish() == ""


def test_a_tokenizer_without_bytes_is_refused(tokenizer):
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decoder is Metaspace, expected ByteLevel"):
        next(stream(MODEL, LOGITS, [[0]], other))
    with pytest.raises(ValueError, match="came as the single 'ab', expected a list"):
        next(stream(MODEL, LOGITS, [[0]], tokenizer, stop_strings="ab"))
