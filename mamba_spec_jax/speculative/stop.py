"""When a row is finished: end-of-sequence tokens, stop strings and the token budget, all decided on the device."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Bool, Int32, RowFlags, Rows, Tokens
from mamba_spec_jax.speculative.acceptance import AcceptResult
from mamba_spec_jax.speculative.rows import is_integer
from mamba_spec_jax.speculative.stop_automaton import StopAutomaton, padded_size
from mamba_spec_jax.speculative.text import encode_stops

_EOS_IDS = 4  # and four times as many as often as it takes


class StopReason(enum.IntEnum):
    """Why a row stopped; at one token, the first that applies."""

    NONE = 0  # it goes on, or had nothing to emit
    EOS = 1
    STOP_STRING = 2
    MAX_NEW = 3
    NO_ROOM = 4  # its cache slot, or its row of tokens, is full
    NO_LOGITS = 5  # the target chooses no token: a logit is NaN or +inf, or all are -inf


@flax.struct.dataclass
class StopConditions:
    """What ends a row, besides its budget.

    A request's `min_new` holds all of it back, as vLLM's `min_tokens` does: before a row has emitted `min_new` tokens,
    an end-of-sequence token is not chosen, and a stop string completed by one of these tokens is text like any other.
    One that a later token completes counts, even if it began earlier.

    Attributes:
        eos_ids: `[E]` tokens any of which ends a row, padded with -1 to one of a few sizes.
        automaton: stop strings, None for none.
    """

    eos_ids: Int32[Array, "E"]
    automaton: StopAutomaton | None = None

    @classmethod
    def create(
        cls,
        eos_ids: Sequence[int] = (),
        stop_strings: Sequence[str | bytes] = (),
        token_bytes: Sequence[bytes] | None = None,
    ) -> "StopConditions":
        """Compiles the conditions; stop strings need `token_bytes`.

        Raises:
            ValueError: for arguments that are not lists of ids, of text and of bytes.
        """
        ids = checked_ids(eos_ids)
        padded = jnp.asarray(np.pad(ids, (0, padded_size(ids.size, _EOS_IDS) - ids.size), constant_values=-1))
        stops = encode_stops(stop_strings)
        if not stops:
            return cls(padded)
        if token_bytes is None:
            raise ValueError(
                f"stop strings {list(stop_strings)!r} came without token_bytes, expected the bytes of each token id: "
                "text.token_bytes reads them off a tokenizer"
            )
        return cls(padded, StopAutomaton.build(stops, token_bytes))

    @property
    def can_stop(self) -> bool:
        """Whether there is a token or text that ends a row; on the host."""
        return bool(jnp.any(self.eos_ids >= 0)) or (
            self.automaton is not None and bool(jnp.any(self.automaton.transitions < 0))
        )

    def for_vocabulary(self, vocab_size: int) -> "StopConditions":
        """The same conditions in the shapes that all of them share for a model: without stop strings, a table of none.

        ValueError for ids or stop strings of another vocabulary; on the host.
        """
        greatest = int(jnp.max(self.eos_ids, initial=-1))
        if greatest >= vocab_size:
            raise ValueError(f"eos_ids contain {greatest}, expected 0..{vocab_size - 1}: the model has no such token")
        automaton = StopAutomaton.empty(vocab_size) if self.automaton is None else self.automaton
        return StopConditions(self.eos_ids, automaton.for_vocabulary(vocab_size))

    def forbidden(self, vocab_size: int, to_come: Rows, depths: Int32[Array, "*B T"]) -> Bool[Array, "B T V"]:
        """End-of-sequence tokens, wherever a row would not have its `min_new` tokens when it ended there.

        Args:
            vocab_size: V (static).
            to_come: `[B]` tokens a row must emit before an end-of-sequence token; 0 and less for none.
            depths: `[T]` or `[B, T]` tokens of the verify pass in front of each node, the root not counted.
        """
        early = jnp.atleast_2d(depths) < to_come[:, None]
        return early[..., None] & self.is_eos(jnp.arange(vocab_size, dtype=jnp.int32))[None, None]

    def is_eos(self, tokens: Int32[Array, "*N"]) -> Bool[Array, "*N"]:
        ids = jnp.expand_dims(self.eos_ids, range(tokens.ndim))
        return jnp.any((tokens[..., None] == ids) & (ids >= 0), axis=-1)


@flax.struct.dataclass
class StopOutcome:
    """An `AcceptResult` cut at the first stop of each row.

    Attributes:
        result: emits nothing past the token that stops a row.
        states: `[B]` states of the stop strings after the emitted tokens.
        finished: `[B]` rows that stopped in this step.
        reasons: `[B]` int32 `StopReason`.
    """

    result: AcceptResult
    states: Rows
    finished: RowFlags
    reasons: Rows


def limit_accept(
    result: AcceptResult,
    stops: StopConditions,
    states: Rows,
    remaining: Rows,
    to_come: Rows,
    room: Rows | None = None,
) -> StopOutcome:
    """Cuts each row at its first end-of-sequence token, completed stop string, or the end of its budget or room.

    The token that stops a row is still emitted, and its state kept; the text of a stop string is cut on the host, by
    `text.cut_at_stop`. A row without budget or room emits nothing and stops with MAX_NEW or NO_ROOM, one that failed
    stops with NO_LOGITS after its accepted drafts; a padding row never stops.

    Args:
        result: what the acceptance emitted.
        stops: the conditions.
        states: `[B]` states of the stop strings before this step.
        remaining: `[B]` tokens each row may still emit.
        to_come: `[B]` tokens a row must emit before the one that may stop it; 0 and less for none.
        room: `[B]` tokens that the cache and the text still hold of each row; None for no such limit.
    """
    lengths = result.accept_lens
    failed = jnp.zeros(lengths.shape, bool) if result.failed is None else result.failed
    columns = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    may_stop = columns >= to_come[:, None]
    first_eos = _first(stops.is_eos(result.tokens) & may_stop & (columns < lengths[:, None]))
    first_match = jnp.full_like(first_eos, columns.size)
    if stops.automaton is not None:
        completes, states = stops.automaton.advance(states, result.tokens, lengths)
        first_match = _first(completes & may_stop)
    at = jnp.minimum(jnp.minimum(first_eos, first_match), remaining - 1)
    if room is not None:
        at = jnp.minimum(at, room - 1)
    stopped = ((lengths > 0) | failed) & (at < lengths)
    finished = stopped | failed
    ordered = {
        StopReason.NO_LOGITS: ~stopped,
        StopReason.EOS: at == first_eos,
        StopReason.STOP_STRING: at == first_match,
        StopReason.MAX_NEW: at == remaining - 1,
    }
    reasons = jnp.select(list(ordered.values()), [jnp.int32(each) for each in ordered], jnp.int32(StopReason.NO_ROOM))
    kept = jnp.where(stopped, jnp.maximum(at + 1, 0), lengths)
    emitted = columns < kept[:, None]
    cut = dataclasses.replace(
        result,
        tokens=jnp.where(emitted, result.tokens, -1),
        accept_lens=kept,
        last_correct_step_indices=jnp.where(stopped, _node(result.path, kept - 1), result.last_correct_step_indices),
        path=None if result.path is None else jnp.where(emitted, result.path, -1),
        logprobs=None if result.logprobs is None else jnp.where(emitted, result.logprobs, 0.0),
    )
    return StopOutcome(cut, states, finished, jnp.where(finished, reasons, StopReason.NONE.value).astype(jnp.int32))


def _node(path: Tokens | None, column: Rows) -> Rows:
    """The node at which the token in a column was chosen, -1 for column -1; on a chain the column itself."""
    if path is None:
        return column
    node = jnp.take_along_axis(path, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]
    return jnp.where(column >= 0, node, -1)


def _first(flags: Bool[Array, "B T"]) -> Rows:
    """The first column whose flag is set, T if none is."""
    width = flags.shape[1]
    return jnp.min(jnp.where(flags, jnp.arange(width, dtype=jnp.int32)[None], width), axis=1).astype(jnp.int32)


def checked_ids(eos_ids: Sequence[int]) -> np.ndarray:
    """`[E]` int32; ValueError for what is no list of token ids."""
    named = f"StopConditions got eos_ids={eos_ids!r}"
    if isinstance(eos_ids, str | bytes) or not isinstance(eos_ids, Iterable):
        raise ValueError(f"{named}, expected a list of token ids: [2]")
    ids = list(eos_ids)
    if not all(map(is_integer, ids)):
        raise ValueError(f"{named}, expected token ids, which are integers")
    if any(not 0 <= token < 2**31 for token in ids):
        raise ValueError(f"{named}, expected token ids of at least 0")
    return np.asarray(ids, np.int32)
