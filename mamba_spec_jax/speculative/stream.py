"""Text as tokens arrive: a generation read chunk by chunk, showing nothing that a later token could take back."""

import codecs
import dataclasses
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Unpack

import numpy as np
import tokenizers

from mamba_spec_jax.speculative.chunks import ChunkReport
from mamba_spec_jax.speculative.generate import Generation, collect, start_generation
from mamba_spec_jax.speculative.protocol import Drafter, SpeculativeModel
from mamba_spec_jax.speculative.requests import GenerationOptions, named_options
from mamba_spec_jax.speculative.state import DecodeState
from mamba_spec_jax.speculative.stop import StopConditions, StopReason, checked_ids
from mamba_spec_jax.speculative.text import cut_at_stop, encode_stops, held_back, token_bytes


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """New text of one row, never empty.

    Attributes:
        row: which prompt it continues.
        text: what to append to the row's text so far.
    """

    row: int
    text: str


@named_options(start_generation)
def stream(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    tokenizer: tokenizers.Tokenizer,
    *,
    stop_strings: Sequence[str] = (),
    eos_ids: Sequence[int] = (),
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    progress: bool | None = False,
    **options: Unpack[GenerationOptions],
) -> Generator[StreamEvent, None, Generation]:
    """Yields text as tokens arrive, a chunk of steps at a time. The prompts are read when it is called.

    Bytes that may turn out to begin a stop string, or that do not yet make a whole character, are held back until it
    is decided. A stop string and special tokens are never shown; the pieces of a row add up to `generated_texts`.

    Args:
        model, params, prompts: as for `generate`.
        tokenizer: the model's, with a decoder that `token_bytes` can read.
        stop_strings: text that ends a row; see `text_stops`.
        eos_ids: tokens that end a row.
        drafter, drafter_params: as for `generate`.
        progress: show a bar on stderr while the prompts are read; None shows it if that is a terminal.
        **options: see `GenerationOptions`.

    Returns:
        The `Generation`, as the generator's value: `generation = yield from stream(...)`.

    Raises:
        ValueError: as `generate`, and for a tokenizer whose tokens have no bytes by themselves.
    """
    stops = text_stops(tokenizer, model.vocab_size, eos_ids, stop_strings)
    table = visible_bytes(tokenizer, model.vocab_size)
    state, chunks = start_generation(
        model,
        params,
        prompts,
        drafter=drafter,
        drafter_params=drafter_params,
        stops=stops,
        progress=progress,
        **options,
    )
    texts = [TextAssembler(table, stop_strings, held) for held in np.asarray(state.requests.min_new).tolist()]
    return _events(state, chunks, texts)


def _events(
    state: DecodeState, chunks: Iterable[tuple[DecodeState, ChunkReport]], texts: list["TextAssembler"]
) -> Generator[StreamEvent, None, Generation]:
    ended: set[int] = set()
    for newest, report in chunks:
        state = newest
        for row, assembler in enumerate(texts):
            if row in ended:
                continue
            text = assembler.push(report.tokens[row, : report.emitted[row]].tolist())
            if not report.active[row]:
                ended.add(row)
                text += assembler.finish()
            if text:
                yield StreamEvent(row, text)
    return collect(state)


def generated_texts(
    generation: Generation, tokenizer: tokenizers.Tokenizer, stop_strings: Sequence[str] = ()
) -> list[str]:
    """The text of each row: without special tokens, and cut before the stop string that is completed first.

    Args:
        generation: from `generate`.
        tokenizer: the model's, with a decoder that `token_bytes` can read.
        stop_strings: those the generation ran with.
    """
    table = visible_bytes(tokenizer)
    texts = []
    for tokens, reason in zip(generation.tokens, generation.reasons, strict=True):
        # A stop string that ended a row was completed by its last token; any before was held back by `min_new`.
        stopped = reason in (StopReason.STOP_STRING, StopReason.EOS)
        assembler = TextAssembler(table, stop_strings, len(tokens) - stopped)
        texts.append(assembler.push(tokens) + assembler.finish())
    return texts


def text_stops(
    tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_ids: Sequence[int] = (), stop_strings: Sequence[str] = ()
) -> StopConditions:
    """Stop conditions that agree with the text `stream` and `generated_texts` show.

    Args:
        tokenizer: the model's, with a decoder that `token_bytes` can read.
        vocab_size: V of the model.
        eos_ids: tokens that end a row.
        stop_strings: text that ends a row. One that spells a special token makes that token end the row too, since
            special tokens have no text.
    """
    table, ids = visible_bytes(tokenizer, vocab_size), checked_ids(eos_ids).tolist()
    encode_stops(stop_strings)  # refuses what is no list of text
    special = {added.content: token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    ids = dict.fromkeys([*ids, *(special[text] for text in stop_strings if text in special)])
    return StopConditions.create(tuple(ids), stop_strings, table)


class TextAssembler:
    """Makes the text of one row from its tokens, in whatever pieces they come.

    Attributes:
        stopped: whether a stop string has been completed; nothing is shown after it.
    """

    def __init__(self, table: Sequence[bytes], stop_strings: Sequence[str] = (), held: int = 0):
        """Begins an empty text.

        Args:
            table: the bytes each token id adds, see `text.token_bytes`; ids past its end add nothing.
            stop_strings: text that ends the row.
            held: tokens at the beginning that complete no stop string, `min_new` of the row.
        """
        self.stopped = False
        self._table = table
        self._held = held
        self._stops = encode_stops(stop_strings)
        self._pending = b""
        # Malformed bytes become U+FFFD, as in the tokenizer's own decoder.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens have decided."""
        tokens = list(tokens)
        held, self._held = tokens[: self._held], max(0, self._held - len(tokens))
        return self._add(held, ()) + self._add(tokens[len(held) :], self._stops)

    def _add(self, tokens: list[int], stops: tuple[bytes, ...]) -> str:
        if self.stopped or not tokens:
            return ""
        # A stop string that is not complete yet begins in the pending bytes, so they are all there is to search. One
        # that is complete in them was held back.
        text = self._pending + b"".join(self._table[token] for token in tokens if token < len(self._table))
        head, self.stopped = cut_at_stop(text, stops, len(self._pending))
        shown = len(head) - (0 if self.stopped else held_back(head, self._stops))
        self._pending = b"" if self.stopped else head[shown:]
        return self._decoder.decode(head[:shown])

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        rest, self._pending = self._pending, b""
        return self._decoder.decode(rest, final=True)


def visible_bytes(tokenizer: tokenizers.Tokenizer, vocab_size: int | None = None) -> list[bytes]:
    """The bytes that each token id adds to the text shown: `token_bytes` with none for special tokens."""
    return token_bytes(tokenizer, vocab_size, skip_special_tokens=True)
