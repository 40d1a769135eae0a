"""Prompt lookup: what followed the last time the text ended like this."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Int32, Rows, Tokens
from mamba_spec_jax.speculative.protocol import Progress, Proposal
from mamba_spec_jax.speculative.sampling import TokenChoice


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Proposes the tokens that followed the most recent earlier occurrence of the longest matching suffix.

    Suffixes of `max_ngram` down to `min_ngram` tokens are tried on all real tokens of a row, prompt included; of the
    earlier occurrences of the longest that has one, the most recent wins. Its continuation is copied token by token
    and reads on into the proposal itself where the text ends, as in LZ77: a row that repeats with a period shorter
    than the draft is continued with that period. A row without a match, or too short for one, proposes nothing.

    Nothing is remembered between steps, and the cost is `max_ngram` passes over the tokens (prompt lookup decoding,
    Saxena 2023).

    Attributes:
        max_drafts: K, the most tokens proposed.
        max_ngram: longest suffix tried.
        min_ngram: shortest suffix tried.
    """

    max_drafts: int
    max_ngram: int = 4
    min_ngram: int = 1

    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposes_trees: ClassVar[bool] = False

    def __post_init__(self):
        check_ngrams(self)

    def init(self, batch: int, max_len: int) -> tuple[()]:
        """No state."""
        return ()

    def propose(
        self, params: Any, state: tuple[()], tokens: Tokens, lengths: Rows, choose: TokenChoice | None, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` tokens, or none, after the last real token of each row.

        Args:
            params: unused, there are no weights.
            state: `()`.
            tokens: `[B, M]` all tokens of each row; columns at or past its length may hold anything.
            lengths: `[B]` real tokens.
            choose: unused, the text alone says what comes.
            num_drafts: K, at most `max_drafts` (static).
        """
        if not 0 <= num_drafts <= self.max_drafts:
            raise ValueError(f"NgramDrafter got num_drafts={num_drafts}, expected 0..{self.max_drafts} (max_drafts)")
        # One plain maximum finds the longest match and, among equals, the latest.
        width = tokens.shape[1]
        best = jnp.max(
            suffix_matches(tokens, lengths, self.max_ngram) * width + jnp.arange(width, dtype=jnp.int32)[None], axis=1
        )
        found = best // width >= self.min_ngram
        continuation = continuations(tokens, lengths, (best % width)[:, None], num_drafts)[:, 0]
        return Proposal(
            tokens=jnp.where(found[:, None], continuation, 0),
            counts=jnp.where(found, jnp.int32(num_drafts), 0),
            state=state,
        )

    def update(self, params: Any, state: tuple[()], progress: Progress) -> tuple[()]:
        """Nothing to follow: the emitted tokens come back with the next `propose`."""
        return state


def suffix_matches(tokens: Tokens, lengths: Rows, max_ngram: int) -> Int32[Array, "B M"]:
    """How many tokens up to and including each column are those that the row ends in, `max_ngram` at most.

    0 from a row's last real token on: what counts is an earlier occurrence.

    Args:
        tokens: `[B, M]`; columns at or past a row's length may hold anything.
        lengths: `[B]` real tokens.
        max_ngram: longest suffix tried (static); each token of it is one pass over `tokens`.
    """
    width = tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)[None]
    last = lengths[:, None] - 1
    runs = jnp.broadcast_to(columns < last, tokens.shape)
    matched = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(max_ngram):
        suffix_token = jnp.take_along_axis(tokens, jnp.clip(last - back, 0, width - 1), axis=1)
        shifted = jnp.roll(tokens, back, axis=1)
        runs &= (shifted == suffix_token) & (columns >= back)
        matched += runs.astype(jnp.int32)
    return matched


def continuations(tokens: Tokens, lengths: Rows, ends: Int32[Array, "B R"], num_drafts: int) -> Int32[Array, "B R K"]:
    """The `num_drafts` tokens after each of the columns `ends`; past the text's end they repeat from their start."""
    start = ends + 1
    period = jnp.maximum(lengths[:, None] - start, 1)
    source = start[..., None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, None] % period[..., None]
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None, None]
    return tokens[rows, jnp.clip(source, 0, tokens.shape[1] - 1)]


def check_ngrams(drafter: Any) -> None:
    """Raises ValueError if `max_drafts`, `max_ngram` and `min_ngram` of a drafter do not fit together."""
    name = type(drafter).__name__
    if drafter.max_drafts < 0:
        raise ValueError(f"{name}.max_drafts is {drafter.max_drafts}, expected at least 0")
    if not 1 <= drafter.min_ngram <= drafter.max_ngram:
        raise ValueError(
            f"{name} got min_ngram={drafter.min_ngram}, max_ngram={drafter.max_ngram}, "
            "expected 1 <= min_ngram <= max_ngram"
        )
