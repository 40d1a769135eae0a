"""From token ids to bytes, and stop strings in them: the host's side of stopping and streaming."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def token_bytes(
    tokenizer: "tokenizers.Tokenizer", vocab_size: int | None = None, *, skip_special_tokens: bool = False
) -> list[bytes]:
    """The bytes each token id adds to the text, exactly as the tokenizer's decoder gives them inside a text.

    Args:
        tokenizer: one whose decoder is `ByteLevel`, or that of SentencePiece's models with bytes to fall back on: there
            alone a token's bytes do not depend on its neighbours. (The latter's decoder leaves out a space at the
            beginning of a text, which may be that of a word which continues a prompt; here it stays.)
        vocab_size: entries of the table, for models whose embedding is padded; ids without a token add nothing.
            By default up to the highest id.
        skip_special_tokens: whether special tokens add nothing, as `Tokenizer.decode` has it by default, or their text.

    Raises:
        ValueError: for another decoder, or an id that `vocab_size` has no room for.
    """
    decode = _token_decoder(_decoder_members(json.loads(tokenizer.to_str())["decoder"]))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    needed = max(vocabulary.values(), default=-1) + 1
    size = needed if vocab_size is None else vocab_size
    if size < needed:
        raise ValueError(
            f"token_bytes got vocab_size={vocab_size}, expected at least {needed}: the tokenizer uses that id"
        )
    table = [b""] * size
    for token, token_id in vocabulary.items():
        table[token_id] = decode(token)
    if skip_special_tokens:
        for token_id, added in tokenizer.get_added_tokens_decoder().items():
            if added.special:
                table[token_id] = b""
    return table


def encode_stops(stop_strings: Sequence[str | bytes]) -> tuple[bytes, ...]:
    """Stop strings as bytes; raises ValueError for an empty one, which would stop everything."""
    if isinstance(stop_strings, str | bytes):
        raise ValueError(f"stop strings came as the single {stop_strings!r}, expected a list of them")
    stops = tuple(stop.encode() if isinstance(stop, str) else bytes(stop) for stop in stop_strings)
    if b"" in stops:
        raise ValueError(f"one of the stop strings {list(stop_strings)!r} is empty, expected characters in each")
    return stops


def cut_at_stop(text: bytes, stop_strings: Sequence[str | bytes]) -> tuple[bytes, bool]:
    """The text before the stop string that is completed first, and whether there is one.

    Of several completed by the same byte, the longest counts. The outcome does not depend on how the text was cut into
    tokens.
    """
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in encode_stops(stop_strings) if stop in text]
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
    """A token with a character outside the alphabet stands for itself: added tokens are often plain text."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()
