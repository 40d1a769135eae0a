"""What a model and a drafter are: all that the speculative loop knows of either."""

from typing import Any, Protocol

import flax.struct

from mamba_spec_jax.array_types import Logits, Parents, RowFlags, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft, ModelOutput, VerifyRecord


class CommitBackend(Protocol):
    """The owner of the post-verify commit."""

    def update_mamba_state_after_mtp_verify(
        self,
        cache: HybridCache,
        record: VerifyRecord,
        last_correct_step_indices: Rows,
        mamba_track_indices: Rows | None = None,
        mamba_steps_to_track: Rows | None = None,
    ) -> HybridCache: ...


class SpeculativeModel(Protocol):
    """A target model. Hashable and static: weights arrive as `params`, state as `cache`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def backend(self) -> CommitBackend: ...

    def init_cache(self, slots: int, max_len: int) -> HybridCache:
        """An empty cache."""
        ...

    def prefill(self, params: Any, tokens: Tokens, cache: HybridCache, *, slots: Rows, num_tokens: Rows) -> ModelOutput:
        """Appends `num_tokens[b]` tokens of each row to its slot; the cache may be donated."""
        ...

    def verify(self, params: Any, draft: Draft, cache: HybridCache) -> ModelOutput:
        """Runs root and drafts in one pass without touching the recurrent state."""
        ...


class Drafter(Protocol):
    """A source of drafts. Hashable and static; what it remembers is a pytree that the loop carries."""

    @property
    def max_drafts(self) -> int:
        """K, the most tokens it proposes: the nodes of a tree, root not counted."""
        ...

    def init(self, batch: int, max_len: int) -> Any:
        """Empty drafter state for `batch` rows of at most `max_len` tokens."""
        ...

    def propose(self, state: Any, tokens: Tokens, lengths: Rows, num_drafts: int) -> "Proposal":
        """Proposes up to `num_drafts` tokens after each row's last token.

        Args:
            state: drafter state.
            tokens: `[B, M]` all tokens of each row so far, prompt included.
            lengths: `[B]` how many of them are real; the last one is the root.
            num_drafts: K, static.
        """
        ...

    def update(self, state: Any, output: ModelOutput, emitted: Tokens, accept_lens: Rows, active: RowFlags) -> Any:
        """Follows the accepted path after the target's verify pass; drafters with a cache of their own commit here."""
        ...


@flax.struct.dataclass
class Proposal:
    """What a drafter suggests.

    Attributes:
        tokens: `[B, K]`; columns at or past the row's length are ignored.
        lengths: `[B]` 0..K.
        probs: `[B, K, V]` float32 the distribution each token was drawn from, None if it was chosen outright.
            Siblings of a tree have that of their parent, from which they were drawn without replacement.
        state: the drafter's state after proposing.
        parents: `[B, K + 1]` of the verify tree, whose node 0 is the root and node k + 1 carries token k: see `Draft`.
            None for a chain. A NumPy array, such as `TreeTopology.rows` gives, is checked while tracing.
    """

    tokens: Tokens
    lengths: Rows
    state: Any
    probs: Logits | None = None
    parents: Parents | None = None
