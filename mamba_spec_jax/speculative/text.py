"""From token ids to bytes, and stop strings in them: the host's side of stopping and streaming."""

import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def token_bytes(
    tokenizer: "tokenizers.Tokenizer", vocab_size: int | None = None, *, skip_special_tokens: bool = False
) -> list[bytes]:
    """The bytes each token id adds to the text, exactly as the tokenizer's decoder gives them inside a text.

    Computed once for a tokenizer (a second or so for 250,000 tokens) and kept as long as it exists; again when its
    decoder, its size or its added tokens have changed.

    Args:
        tokenizer: one whose decoder is `ByteLevel`, or that of SentencePiece's models with bytes to fall back on: there
            alone a token's bytes do not depend on its neighbours. (The latter's decoder leaves out a space at the
            beginning of a text, which may be that of a word which continues a prompt; here it stays.)
        vocab_size: entries of the table, for models whose embedding is padded; ids without a token add nothing.
            By default up to the highest id.
        skip_special_tokens: whether special tokens add nothing, as `Tokenizer.decode` has it by default, or their text.

    Raises:
        ValueError: for another decoder, an id that `vocab_size` has no room for, or what is no tokenizer.
    """
    if not hasattr(tokenizer, "get_added_tokens_decoder"):
        raise ValueError(f"the tokenizer is {tokenizer!r}, expected a tokenizers.Tokenizer")
    decoder = None if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    added = {token: (entry.content, entry.special) for token, entry in tokenizer.get_added_tokens_decoder().items()}
    made_from = (decoder, tokenizer.get_vocab_size(with_added_tokens=True), added)
    if tokenizer not in _TABLES or _TABLES[tokenizer].made_from != made_from:
        _TABLES[tokenizer] = _Tables(made_from, _all_token_bytes(tokenizer, decoder), {})
    tables = _TABLES[tokenizer]
    size = len(tables.whole) if vocab_size is None else vocab_size
    if size < len(tables.whole):
        raise ValueError(
            f"token_bytes got vocab_size={vocab_size}, expected at least {len(tables.whole)}: the tokenizer uses that "
            "id"
        )
    if (size, skip_special_tokens) not in tables.variants:
        table = list(tables.whole) + [b""] * (size - len(tables.whole))
        for token in (token for token, (_, special) in added.items() if special and skip_special_tokens):
            table[token] = b""
        tables.variants[size, skip_special_tokens] = tuple(table)
    return list(tables.variants[size, skip_special_tokens])


class _Tables(NamedTuple):
    """What was computed for a tokenizer, and the properties of the tokenizer that it was computed from."""

    made_from: tuple
    whole: list[bytes]
    variants: dict[tuple[int, bool], tuple[bytes, ...]]


_TABLES: "weakref.WeakKeyDictionary[tokenizers.Tokenizer, _Tables]" = weakref.WeakKeyDictionary()


def _all_token_bytes(tokenizer: "tokenizers.Tokenizer", decoder: bytes | None) -> list[bytes]:
    decode = _token_decoder(_decoder_members(None if decoder is None else json.loads(decoder)))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = decode(token)
    return table


def utf8(text: str, name: str) -> bytes:
    """Its bytes; ValueError for text with surrogates, which Python makes of command lines that are not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not text: its character {error.start} is no Unicode, expected UTF-8") from error


def encode_stops(stop_strings: Sequence[str | bytes]) -> tuple[bytes, ...]:
    """Stop strings as bytes; ValueError for what is no list of them, and an empty one, which would stop everything."""
    if isinstance(stop_strings, str | bytes):
        raise ValueError(f"stop strings came as the single {stop_strings!r}, expected a list of them")
    if not isinstance(stop_strings, Iterable) or not all(isinstance(stop, str | bytes) for stop in stop_strings):
        raise ValueError(f"stop strings are {stop_strings!r}, expected a list of text")
    stops = tuple(utf8(stop, "a stop string") if isinstance(stop, str) else stop for stop in stop_strings)
    if b"" in stops:
        raise ValueError(f"one of the stop strings {list(stop_strings)!r} is empty, expected characters in each")
    return stops


def cut_at_stop(text: bytes, stop_strings: Sequence[str | bytes], searched: int = 0) -> tuple[bytes, bool]:
    """The text before the stop string that is completed first, and whether there is one.

    Of several completed by the same byte, the longest counts. The outcome does not depend on how the text was cut into
    tokens.

    Args:
        text: to search.
        stop_strings: to search for.
        searched: bytes at the beginning of `text` in which no completed stop string counts.
    """
    lengths = {stop: len(stop) for stop in encode_stops(stop_strings)}
    starts = {stop: text.find(stop, max(0, searched - length + 1)) for stop, length in lengths.items()}
    ends = [(starts[stop] + length, -length) for stop, length in lengths.items() if starts[stop] >= 0]
    if not ends:
        return text, False
    end, negative_length = min(ends)
    return text[: end + negative_length], True


def held_back(text: bytes, stop_strings: Sequence[str | bytes]) -> int:
    """How many bytes at the end of `text` may turn out to begin a stop string, and must not be shown yet.

    For text in which no stop string is complete; see `cut_at_stop`.
    """
    return max(
        (n for stop in encode_stops(stop_strings) for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


def _decoder_members(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [found for member in decoder["decoders"] for found in _decoder_members(member)]
    return [decoder]


def _token_decoder(members: list[dict]) -> Callable[[str], bytes]:
    """From one token's name to its bytes."""
    names = [member["type"] for member in members]
    if [name for name in names if name != "Fuse"] == ["ByteLevel"]:
        return _decode_byte_level
    texts = [member["pattern"].get("String") for member in members if member["type"] == "Replace"]
    rest = [name for name in names if name != "Replace"]
    if rest[:2] == ["ByteFallback", "Fuse"] and rest[2:] in ([], ["Strip"]) and None not in texts:
        contents = [member["content"] for member in members if member["type"] == "Replace"]
        return functools.partial(_decode_piece, list(zip(texts, contents, strict=True)))
    raise ValueError(
        f"the tokenizer's decoder is {' + '.join(names) or None}, expected ByteLevel, or Replace + ByteFallback + Fuse "
        "+ Strip: with any other, a token's bytes depend on its neighbours or cannot be known; build the table "
        "yourself, one bytes object per token id"
    )


def _decode_piece(replaced: list[tuple[str, str]], token: str) -> bytes:
    """A SentencePiece token: a byte, spelled `<0x0A>`, or text in which spaces are spelled otherwise."""
    if _BYTE.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    for spelled, text in replaced:
        token = token.replace(spelled, text)
    return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level tokenizers spell each byte as one printable character: itself where it is one, else from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _decode_byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet is taken as text: added tokens often are."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()
