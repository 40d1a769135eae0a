"""When a row is finished: end-of-sequence tokens, stop strings and the token budget, all decided on the device."""

import dataclasses
import enum
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Bool, Int32, RowFlags, Rows, Tokens
from mamba_spec_jax.speculative.acceptance import AcceptResult
from mamba_spec_jax.speculative.text import encode_stops


class StopReason(enum.IntEnum):
    """Why a row stopped; at one token, the first that applies."""

    NONE = 0  # it goes on, or had nothing to emit
    EOS = 1
    STOP_STRING = 2
    MAX_NEW = 3


@flax.struct.dataclass
class StopAutomaton:
    """Recognises stop strings in the bytes of a token stream, one table look-up a token.

    The Aho-Corasick automaton (1975) of the stop strings, closed over tokens: a state is the longest suffix of the text
    so far that begins a stop string, and a token leads through all of its bytes. A token inside which a stop string is
    completed leads to the last state, which is never left.

    Attributes:
        transitions: `[states, V]` the state after a token. State 0 is the start, `states - 1` means matched.
    """

    transitions: Int32[Array, "states V"]

    @classmethod
    def build(
        cls, stop_strings: Sequence[str | bytes], token_bytes: Sequence[bytes], max_bytes: int = 2**28
    ) -> "StopAutomaton":
        """Compiles stop strings for a vocabulary, on the host.

        Args:
            stop_strings: text is matched as UTF-8.
            token_bytes: what each token id adds to the text; see `text.token_bytes`.
            max_bytes: the largest table allowed: 4 bytes for each state and token. There are about as many states as
                bytes in the stop strings.

        Raises:
            ValueError: for an empty stop string, or a table larger than `max_bytes`.
        """
        stops = encode_stops(stop_strings)
        prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))} | {b""}, key=len)
        states, vocab = len(prefixes) + 1, len(token_bytes)
        if states * vocab * 4 > max_bytes:
            raise ValueError(
                f"{len(stops)} stop strings need a table of {states} states x {vocab} tokens x 4 bytes = "
                f"{states * vocab * 4:,} bytes, expected at most max_bytes={max_bytes:,}: use fewer or shorter ones"
            )
        return cls(jnp.asarray(_close_over_tokens(_byte_transitions(stops, prefixes), token_bytes)))

    @property
    def num_states(self) -> int:
        return self.transitions.shape[0]

    @property
    def nbytes(self) -> int:
        return self.transitions.size * self.transitions.dtype.itemsize

    def advance(self, states: Rows, tokens: Tokens, lengths: Rows) -> tuple[Rows, Rows]:
        """Reads the first `lengths[b]` tokens of each row.

        Args:
            states: `[B]` from the step before, 0 at the start of the generated text.
            tokens: `[B, T]`; a token without an entry in the table breaks off every match.
            lengths: `[B]` 0..T.

        Returns:
            `[B]` column of the token that completes a stop string (T if none does), and the `[B]` states after the
            row's last token.
        """
        columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

        def read(state, token):
            state = self.transitions.at[state, token].get(mode="fill", fill_value=0)
            return state, state

        visited = jax.lax.scan(read, states, tokens.T, unroll=True)[1].T
        after = jnp.take_along_axis(visited, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        first = _first(visited == self.num_states - 1, columns < lengths[:, None])
        return first, jnp.where(lengths > 0, after, states)


@flax.struct.dataclass
class StopConditions:
    """What ends a row, besides its budget.

    Attributes:
        eos_ids: `[E]` tokens any of which ends a row; E may be 0.
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
        """Compiles the conditions; stop strings need `token_bytes`, ValueError otherwise."""
        if any(token < 0 for token in eos_ids):
            raise ValueError(f"StopConditions got eos_ids={tuple(eos_ids)}, expected token ids of at least 0")
        ids = jnp.asarray(np.asarray(eos_ids, np.int32).reshape(-1))
        if not stop_strings:
            return cls(ids)
        if token_bytes is None:
            raise ValueError(
                f"stop strings {list(stop_strings)!r} came without token_bytes, expected the bytes of each token id: "
                "text.token_bytes reads them off a tokenizer"
            )
        return cls(ids, StopAutomaton.build(stop_strings, token_bytes))

    def initial_states(self, batch: int) -> Rows:
        """`[B]` states of the stop strings before any generated token: what the prompt ends with does not count."""
        return jnp.zeros((batch,), jnp.int32)

    def forbidden(
        self, vocab_size: int, new_tokens: Rows, min_new: Rows, depths: Int32[Array, "*B T"]
    ) -> Bool[Array, "B T V"]:
        """End-of-sequence tokens, wherever a row would not have its `min_new` tokens when it ended there.

        Args:
            vocab_size: V (static).
            new_tokens: `[B]` tokens emitted so far.
            min_new: `[B]` tokens a row emits before an end-of-sequence token may be among them.
            depths: `[T]` or `[B, T]` tokens of the verify pass in front of each node, the root not counted.
        """
        early = new_tokens[:, None] + depths < min_new[:, None]
        return early[..., None] & self.is_eos(jnp.arange(vocab_size, dtype=jnp.int32))[None, None]

    def is_eos(self, tokens: Int32[Array, "*N"]) -> Bool[Array, "*N"]:
        return jnp.any(tokens[..., None] == jnp.expand_dims(self.eos_ids, range(tokens.ndim)), axis=-1)


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


def limit_accept(result: AcceptResult, stops: StopConditions, states: Rows, remaining: Rows) -> StopOutcome:
    """Cuts each row at its first end-of-sequence token, completed stop string or the end of its budget.

    The token that stops a row is still emitted, and its state kept; the text of a stop string is cut on the host, by
    `text.cut_at_stop`. A row without budget emits nothing and stops with MAX_NEW; a padding row never stops.

    Args:
        result: what the acceptance emitted.
        stops: the conditions.
        states: `[B]` states of the stop strings before this step.
        remaining: `[B]` tokens each row may still emit.
    """
    lengths = result.accept_lens
    columns = jnp.arange(result.tokens.shape[1], dtype=jnp.int32)[None]
    first_eos = _first(stops.is_eos(result.tokens), columns < lengths[:, None])
    first_match = jnp.full_like(first_eos, columns.size)
    if stops.automaton is not None:
        first_match, states = stops.automaton.advance(states, result.tokens, lengths)
    at = jnp.minimum(jnp.minimum(first_eos, first_match), remaining - 1)
    finished = (lengths > 0) & (at < lengths)
    reasons = jnp.where(
        at == first_eos,
        StopReason.EOS.value,
        jnp.where(at == first_match, StopReason.STOP_STRING.value, StopReason.MAX_NEW.value),
    )
    kept = jnp.where(finished, jnp.maximum(at + 1, 0), lengths)
    emitted = columns < kept[:, None]
    cut = dataclasses.replace(
        result,
        tokens=jnp.where(emitted, result.tokens, -1),
        accept_lens=kept,
        last_correct_step_indices=jnp.where(finished, _node(result.path, kept - 1), result.last_correct_step_indices),
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


def _first(flags: Bool[Array, "B T"], live: Bool[Array, "B T"]) -> Rows:
    """The first live column whose flag is set, T if none is."""
    width = flags.shape[1]
    return jnp.min(jnp.where(flags & live, jnp.arange(width, dtype=jnp.int32)[None], width), axis=1).astype(jnp.int32)


def _byte_transitions(stops: tuple[bytes, ...], prefixes: list[bytes]) -> np.ndarray:
    """`[states, 256]`: from each prefix, the longest suffix of prefix and byte that is one; matched absorbs."""
    matched = len(prefixes)
    index = {prefix: state for state, prefix in enumerate(prefixes)}
    table = np.zeros((matched + 1, 256), np.int32)
    table[matched] = matched
    for prefix, state in index.items():
        for byte in set(b"".join(stops)):
            text = prefix + bytes([byte])
            suffix = next(text[start:] for start in range(len(text) + 1) if text[start:] in index)
            table[state, byte] = matched if text.endswith(stops) else index[suffix]
    return table


def _close_over_tokens(byte_table: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """`[states, V]`: from each state through all bytes of each token."""
    lengths = np.fromiter(map(len, token_bytes), np.int64, len(token_bytes))
    table = np.repeat(np.arange(len(byte_table), dtype=np.int32)[:, None], len(token_bytes), axis=1)
    for at in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > at)
        column = np.array([token_bytes[token][at] for token in tokens.tolist()])
        table[:, tokens] = byte_table[table[:, tokens], column]
    return table
