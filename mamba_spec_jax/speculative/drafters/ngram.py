"""Prompt lookup: what followed the last time the text ended like this."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from mamba_spec_jax.array_types import Rows, Tokens
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
        if self.max_drafts < 0:
            raise ValueError(f"NgramDrafter.max_drafts is {self.max_drafts}, expected at least 0")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"NgramDrafter got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}, "
                "expected 1 <= min_ngram <= max_ngram"
            )

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
        matched, end = self._longest_match(tokens, lengths)
        start = end + 1
        period = jnp.maximum(lengths - start, 1)
        source = start[:, None] + jnp.arange(num_drafts, dtype=jnp.int32) % period[:, None]
        continuation = jnp.take_along_axis(tokens, jnp.clip(source, 0, tokens.shape[1] - 1), axis=1)
        found = matched >= self.min_ngram
        return Proposal(
            tokens=jnp.where(found[:, None], continuation, 0),
            lengths=jnp.where(found, num_drafts, 0).astype(jnp.int32),
            state=state,
        )

    def update(self, params: Any, state: tuple[()], progress: Progress) -> tuple[()]:
        """Nothing to follow: the emitted tokens come back with the next `propose`."""
        return state

    def _longest_match(self, tokens: Tokens, lengths: Rows) -> tuple[Rows, Rows]:
        """Length of the longest suffix with an earlier occurrence (0 for none), and where the latest of those ends."""
        width = tokens.shape[1]
        columns = jnp.arange(width, dtype=jnp.int32)
        last = lengths[:, None] - 1
        runs = jnp.broadcast_to(columns < last, tokens.shape)
        matched = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.max_ngram):
            suffix_token = jnp.take_along_axis(tokens, jnp.clip(last - back, 0, width - 1), axis=1)
            shifted = jnp.roll(tokens, back, axis=1)
            runs &= (shifted == suffix_token) & (columns >= back)
            matched += runs.astype(jnp.int32)
        # One plain maximum finds the longest match and, among equals, the latest.
        best = jnp.max(matched * width + columns, axis=1)
        return best // width, best % width
