"""Bytes of tokens against the tokenizer's own decoder; stop strings in text that arrives piece by piece."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from mamba_spec_jax.speculative.text import cut_at_stop, held_back, token_bytes

ENGLISH_AND_MORE = "the cat, the hat — déjà vu 日本語 def f(x): return x "


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([ENGLISH_AND_MORE * 20], trainer)
    # Plain text inside the byte alphabet, outside of it, and special.
    tokenizer.add_tokens([AddedToken("né"), AddedToken("a tool 日"), AddedToken("<|sp ecial|>", special=True)])
    return tokenizer


@pytest.mark.parametrize("skip", [False, True])
def test_bytes_spell_what_the_tokenizer_decodes(tokenizer, skip):
    table = token_bytes(tokenizer, skip_special_tokens=skip)
    assert len(table) == tokenizer.get_vocab_size(with_added_tokens=True) > 257
    assert {bytes([byte]) for byte in range(256)} <= set(table)
    rng = np.random.default_rng(0)
    for ids in rng.integers(0, len(table), (200, 8)).tolist():
        text = b"".join(table[token] for token in ids)
        assert text.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=skip)
    ids = tokenizer.encode(ENGLISH_AND_MORE).ids
    assert b"".join(table[token] for token in ids).decode() == ENGLISH_AND_MORE


def test_padded_vocabulary_and_sequence_decoder(tokenizer):
    expected = token_bytes(tokenizer)
    assert token_bytes(tokenizer, 400) == expected + [b""] * (400 - len(expected))
    wrapped = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    wrapped.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert token_bytes(wrapped) == expected


@pytest.fixture(scope="module")
def sentencepiece():
    """As SentencePiece's models are converted: spaces spelled as ▁, one before each text, and a byte for each else."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["▁the▁cat,▁the▁hat▁def▁f(x):▁return▁x\n" * 20], trainer)
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def test_bytes_of_sentencepiece_tokens(sentencepiece):
    table = token_bytes(sentencepiece)
    assert len(set(table)) > 256 + 20
    for text in ("the cat", "", " the", ENGLISH_AND_MORE, "a\n\nb"):
        ids = sentencepiece.encode(text).ids
        decoded = b"".join(table[token] for token in ids).decode()
        assert decoded == (f" {text}" if text else "")
        assert decoded.removeprefix(" ") == sentencepiece.decode(ids)
    rng = np.random.default_rng(0)
    words = [token for token, spelled in enumerate(table) if len(spelled) > 1]
    for ids in rng.choice(words, (100, 8)).tolist():
        text = b"".join(table[token] for token in ids).decode()
        assert text.removeprefix(" ") == sentencepiece.decode(ids, skip_special_tokens=False)


def test_undeterminable_tokenizers_are_refused(tokenizer):
    other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    other.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="decoder is Metaspace, expected ByteLevel"):
        token_bytes(other)
    other.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match=r"decoder is ByteLevel \+ Strip, expected ByteLevel"):
        token_bytes(other)
    other.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()])
    with pytest.raises(ValueError, match=r"decoder is ByteFallback \+ Strip \+ Fuse, expected ByteLevel, or Replace"):
        token_bytes(other)
    with pytest.raises(ValueError, match="decoder is None, expected ByteLevel"):
        token_bytes(tokenizers.Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match=r"vocab_size=10, expected at least \d+"):
        token_bytes(tokenizer, 10)


def test_cut_is_before_the_first_completed_stop_string():
    assert cut_at_stop(b"say <end> more", ["<end>", "more"]) == (b"say ", True)
    assert cut_at_stop(b"abcd", ["bcd", "c"]) == (b"ab", True)  # "c" is complete before "bcd" is
    assert cut_at_stop(b"abcd", ["cd", "bcd"]) == (b"a", True)  # both at once: the longer one
    assert cut_at_stop("é!".encode(), ["é"]) == (b"", True)
    assert cut_at_stop(b"abc", []) == (b"abc", False)
    assert cut_at_stop(b"", ["a"]) == (b"", False)


texts = st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=14).map(b"".join)
stop_lists = st.lists(
    st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=4).map(b"".join), min_size=1, max_size=3
)


@given(texts, stop_lists)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shown_text_only_grows_and_never_shows_a_stop(text, stops):
    final, _ = cut_at_stop(text, stops)
    shown = b""
    for end in range(len(text) + 1):
        head, stopped = cut_at_stop(text[:end], stops)
        if stopped:
            assert head == final
            break
        held = held_back(head, stops)
        assert held == max(
            n for n in range(len(head) + 1) if any(s[:n] == head[end - n :] and n < len(s) for s in stops)
        )
        assert head[: end - held].startswith(shown)
        shown = head[: end - held]
        assert final.startswith(shown)
    assert final.startswith(shown)
