"""From token ids to bytes, and stop strings in them: the host's side of stopping and streaming."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


def token_bytes(
    tokenizer: "tokenizers.Tokenizer", vocab_size: int | None = None, *, skip_special_tokens: bool = False
) -> list[bytes]:
    """The bytes each token id adds to the text, exactly as the tokenizer's byte-level decoder gives them.

    Args:
        tokenizer: one whose decoder is `ByteLevel`: there alone a token's bytes do not depend on its neighbours.
        vocab_size: entries of the table, for models whose embedding is padded; ids without a token add nothing.
            By default up to the highest id.
        skip_special_tokens: whether special tokens add nothing, as `Tokenizer.decode` has it by default, or their text.

    Raises:
        ValueError: for another decoder, or an id that `vocab_size` has no room for.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"]
    names = _decoder_names(decoder)
    if [name for name in names if name != "Fuse"] != ["ByteLevel"]:
        raise ValueError(
            f"the tokenizer's decoder is {' + '.join(names) or None}, expected ByteLevel: with any other, a token's "
            "bytes depend on its neighbours or cannot be known; build the table yourself, one bytes object per token id"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    needed = max(vocabulary.values(), default=-1) + 1
    size = needed if vocab_size is None else vocab_size
    if size < needed:
        raise ValueError(
            f"token_bytes got vocab_size={vocab_size}, expected at least {needed}: the tokenizer uses that id"
        )
    table = [b""] * size
    for token, token_id in vocabulary.items():
        table[token_id] = _decode_byte_level(token)
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


def _decoder_names(decoder: dict | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [name for member in decoder["decoders"] for name in _decoder_names(member)]
    return [decoder["type"]]


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
