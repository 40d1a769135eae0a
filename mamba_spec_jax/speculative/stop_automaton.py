"""Stop strings in a stream of tokens: compiled for a vocabulary on the host, followed on the device."""

from collections.abc import Sequence

import flax.struct
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Bool, Int32, Rows, Tokens
from mamba_spec_jax.speculative.text import encode_stops
from pallas_kernels import loops

# Tables are padded to these sizes and to four times as much as often as it takes, so that other stop strings rarely
# mean another program.
_STATES, _CLASSES = 64, 512


@flax.struct.dataclass
class StopAutomaton:
    """Recognises stop strings in the bytes of a token stream, by two table look-ups a token.

    The Aho-Corasick automaton (1975) of the stop strings, closed over tokens: a state is the longest suffix of the text
    so far that begins a stop string, and a token leads through all of its bytes. State 0 is the start. Most tokens
    lead back to it from everywhere; tokens that lead every state to the same place are one class, so the table has a
    column for each class instead of one for each token.

    Attributes:
        classes: `[V]` the class of each token; 0 leads to state 0 from everywhere.
        transitions: `[states, classes]` the state after a token of that class; `~state` (below 0) where the token
            completes a stop string.
    """

    classes: Int32[Array, "V"]
    transitions: Int32[Array, "states classes"]

    @classmethod
    def build(
        cls, stop_strings: Sequence[str | bytes], token_bytes: Sequence[bytes], max_bytes: int = 2**28
    ) -> "StopAutomaton":
        """Compiles stop strings for a vocabulary, on the host.

        Args:
            stop_strings: text is matched as UTF-8.
            token_bytes: what each token id adds to the text; see `text.token_bytes`.
            max_bytes: the most memory used meanwhile: 2 bytes for each state and token. There are about as many states
                as bytes in the stop strings.

        Raises:
            ValueError: for an empty stop string, or one that takes more than `max_bytes`.
        """
        stops = encode_stops(stop_strings)
        if isinstance(token_bytes, str | bytes) or not all(isinstance(data, bytes) for data in token_bytes):
            raise ValueError("token_bytes is no list of bytes objects, expected the bytes of each token id")
        prefixes = sorted({stop[:n] for stop in stops for n in range(len(stop))} | {b""}, key=len)
        states, vocab = len(prefixes), len(token_bytes)
        if states * vocab * 2 > max_bytes or states > np.iinfo(np.int16).max:
            raise ValueError(
                f"{len(stops)} stop strings need a table of {states} states x {vocab} tokens x 2 bytes = "
                f"{states * vocab * 2:,} bytes, expected at most max_bytes={max_bytes:,}: use fewer or shorter ones"
            )
        return cls._padded(*_classify(_close_over_tokens(_byte_transitions(stops, prefixes), token_bytes)))

    @classmethod
    def empty(cls, vocab_size: int) -> "StopAutomaton":
        """No stop strings, in the shapes of few of them."""
        return cls._padded(np.zeros(vocab_size, np.int32), np.zeros((1, 1), np.int32))

    @classmethod
    def _padded(cls, classes: np.ndarray, transitions: np.ndarray) -> "StopAutomaton":
        states, columns = transitions.shape
        room = (padded_size(states, _STATES) - states, padded_size(columns, _CLASSES) - columns)
        return cls(jnp.asarray(classes), jnp.asarray(np.pad(transitions, ((0, room[0]), (0, room[1])))))

    @property
    def vocab_size(self) -> int:
        return self.classes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.classes.nbytes + self.transitions.nbytes

    def for_vocabulary(self, vocab_size: int) -> "StopAutomaton":
        """The same for a model with more tokens, whose others break off every match."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the stop strings were compiled for {self.vocab_size} tokens, but the model has {vocab_size}: give "
                "token_bytes of the model's own tokenizer"
            )
        return self.replace(classes=jnp.pad(self.classes, (0, vocab_size - self.vocab_size)))  # type: ignore[attr-defined]

    def advance(self, states: Rows, tokens: Tokens, lengths: Rows) -> tuple[Bool[Array, "B T"], Rows]:
        """Reads the first `lengths[b]` tokens of each row.

        Args:
            states: `[B]` from the step before, 0 at the start of the generated text.
            tokens: `[B, T]`; a token outside the vocabulary breaks off every match.
            lengths: `[B]` 0..T.

        Returns:
            `[B, T]` whether each token that was read completes a stop string, and the `[B]` states after the row's last
            token. A match goes on as if it had not been one: whether it ends the row is the caller's decision.
        """
        column = self.classes.at[tokens].get(mode="fill", fill_value=0, wrap_negative_indices=False)

        def read(state, token_class):
            after = self.transitions[state, token_class]
            state = jnp.where(after < 0, ~after, after)
            return state, (state, after < 0)

        _, (visited, completes) = loops.scan(read, states, column.T, unroll=True)
        after = jnp.take_along_axis(visited.T, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
        read_columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        return completes.T & read_columns, jnp.where(lengths > 0, after, states)


def padded_size(size: int, least: int) -> int:
    """The first of `least`, 4 `least`, 16 `least`, ... that is not below `size`."""
    while least < size:
        least *= 4
    return least


def _byte_transitions(stops: tuple[bytes, ...], prefixes: list[bytes]) -> np.ndarray:
    """`[states, 256]` int16: from each prefix, the longest suffix of prefix and byte that is one; `~` it at a match."""
    index = {prefix: state for state, prefix in enumerate(prefixes)}
    table = np.zeros((len(prefixes), 256), np.int16)
    for prefix, state in index.items():
        for byte in set(b"".join(stops)):
            text = prefix + bytes([byte])
            after = next(index[text[start:]] for start in range(len(text) + 1) if text[start:] in index)
            table[state, byte] = ~after if text.endswith(stops) else after
    return table


def _close_over_tokens(byte_table: np.ndarray, token_bytes: Sequence[bytes]) -> np.ndarray:
    """`[states, V]` int16: from each state through all bytes of each token; `~` the state if any of them matches."""
    lengths = np.fromiter(map(len, token_bytes), np.int64, len(token_bytes))
    data = np.frombuffer(b"".join(token_bytes), np.uint8)
    starts = np.cumsum(lengths) - lengths
    table = np.repeat(np.arange(len(byte_table), dtype=np.int16)[:, None], len(token_bytes), axis=1)
    for at in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > at)
        before = table[:, tokens]
        after = byte_table[np.where(before < 0, ~before, before), data[starts[tokens] + at]]
        table[:, tokens] = np.where((before < 0) & (after >= 0), ~after, after)
    return table


def _classify(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and `[states, classes]` their columns, the first of which is zero."""
    tokens = np.flatnonzero(table.any(axis=0))
    classes = np.zeros(table.shape[1], np.int32)
    columns, classes_of = np.unique(table[:, tokens], axis=1, return_inverse=True)
    classes[tokens] = 1 + classes_of.reshape(-1)
    return classes, np.pad(columns.astype(np.int32), ((0, 0), (1, 0)))
