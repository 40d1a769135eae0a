"""What a decoding loop carries: its weights, and all that changes from step to step."""

from typing import Any

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Int32, RowFlags, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.speculative.requests import Requests
from mamba_spec_jax.speculative.stop import StopConditions, StopReason


@flax.struct.dataclass
class Weights:
    """The weights that a step reads.

    Attributes:
        target: the target model's.
        drafter: the drafter's, None if it has none.
    """

    target: Any
    drafter: Any = None


@flax.struct.dataclass
class Statistics:
    """Counts since the start.

    Attributes:
        passes: `[B]` verify passes in which the row was active.
        drafted: `[B]` tokens proposed to them.
        histogram: `[B, T]` passes that emitted 1..T tokens, for the largest T the loop runs.
    """

    passes: Rows
    drafted: Rows
    histogram: Int32[Array, "B T"]

    @classmethod
    def create(cls, batch: int, num_drafts: int) -> "Statistics":
        """Zeros, for steps of up to `num_drafts` drafts."""
        rows = jnp.zeros((batch,), jnp.int32)
        return cls(rows, jnp.zeros_like(rows), jnp.zeros((batch, num_drafts + 1), jnp.int32))

    @property
    def emitted(self) -> Rows:
        """`[B]` tokens emitted."""
        return jnp.sum(
            self.histogram * jnp.arange(1, self.histogram.shape[1] + 1, dtype=jnp.int32)[None], axis=1, dtype=jnp.int32
        )

    @property
    def mean_acceptance_length(self) -> Float[Array, ""]:
        """Tokens emitted per verify pass, bonus token included, over all rows; 0 before the first pass."""
        return jnp.sum(self.emitted) / jnp.maximum(jnp.sum(self.passes), 1)


@flax.struct.dataclass
class DecodeState:
    """All that changes from step to step, and what the rows ask for.

    A row's last token, the root, is always one ahead of its cache: it enters with the next verify pass.

    Attributes:
        cache: the target's.
        drafter: the drafter's own state.
        tokens: `[B, M]` prompt and emitted tokens.
        lengths: `[B]` how many of them are real, at least 1.
        prompt_lengths: `[B]`.
        reasons: `[B]` `StopReason` of finished rows, NONE for the others.
        stop_states: `[B]` how far each row is into a stop string.
        requests: what the rows ask for.
        stops: what ends a row, besides its budget.
        statistics: counts.
        logprobs: `[B, M]` float32 of the emitted tokens under the target, None unless asked for.
    """

    cache: HybridCache
    drafter: Any
    tokens: Tokens
    lengths: Rows
    prompt_lengths: Rows
    reasons: Rows
    stop_states: Rows
    requests: Requests
    stops: StopConditions
    statistics: Statistics
    logprobs: Float[Array, "B M"] | None = None

    @property
    def active(self) -> RowFlags:
        """`[B]` rows that still decode."""
        exists = (self.requests.slots >= 0) & (self.requests.slots < self.cache.slots)
        return (self.reasons == StopReason.NONE.value) & exists

    @property
    def new_tokens(self) -> Rows:
        """`[B]` tokens emitted so far."""
        return self.lengths - self.prompt_lengths

    @property
    def remaining(self) -> Rows:
        """`[B]` tokens that each row may still emit of its budget, 0 for rows that are not active."""
        return jnp.where(self.active, self.requests.max_new - self.new_tokens, 0)

    @property
    def room(self) -> Rows:
        """`[B]` tokens that each row may still emit before its cache slot, or its row of `tokens`, is full."""
        return jnp.minimum(self.cache.room(self.requests.slots), self.tokens.shape[1] - self.lengths)
