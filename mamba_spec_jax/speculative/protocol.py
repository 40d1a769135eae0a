"""What a model and a drafter are: all that the speculative loop knows of either."""

from typing import Any, Protocol

import flax.struct

from mamba_spec_jax.array_types import Array, Hidden, Logits, Parents, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import CommitBackend, Draft, ModelOutput
from mamba_spec_jax.modes import DTypePolicy, ForwardMode
from mamba_spec_jax.speculative.sampling import TokenChoice


class SpeculativeModel(Protocol):
    """A target model. Hashable and static: weights arrive as `params`, state as `cache`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers whose outputs every pass returns as `ModelOutput.hidden`."""
        ...

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


@flax.struct.dataclass
class Progress:
    """What the target has read in one pass, and what a drafter may learn from it: a path, whatever tree it came from.

    Attributes:
        tokens: `[B, T]` consecutive tokens that were read.
        following: `[B, T]` the token that follows each in the text.
        hidden: `[B, T, D]` the target's hidden state at each, for every layer that the drafter asks for.
        counts: `[B]` how many columns are real; 0 in rows that do not advance.
        mode: the pass, EXTEND for a piece of prompt, TARGET_VERIFY for an accepted path (static).
        as_proposed: whether an accepted path is always one that this drafter proposed itself, if it proposed anything;
            False where the drafts of another may have been verified in its place (static).
    """

    tokens: Tokens
    following: Tokens
    hidden: tuple[Hidden, ...]
    counts: Rows
    mode: ForwardMode = flax.struct.field(pytree_node=False)
    as_proposed: bool = flax.struct.field(pytree_node=False, default=True)


class Drafter(Protocol):
    """A source of drafts. Hashable and static; its weights arrive as `params`, what it remembers is a pytree.

    Rows of its state are batch rows. A drafter that has a recurrent state brings it to the accepted prefix
    by `update_mamba_state_after_mtp_verify`, as the target does. One that has its own vocabulary says how large it
    is by a `vocab_size`, which must be the target's.
    """

    @property
    def max_drafts(self) -> int:
        """K, the most tokens it proposes: the nodes of a tree, root not counted."""
        ...

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers of the target whose hidden states it reads."""
        ...

    @property
    def proposes_trees(self) -> bool:
        """Whether its proposals have `parents`."""
        ...

    def init(self, batch: int, max_len: int) -> Any:
        """Empty drafter state for `batch` rows of at most `max_len` tokens."""
        ...

    def propose(
        self, params: Any, state: Any, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> "Proposal":
        """Proposes up to `num_drafts` tokens after each row's last token.

        Args:
            params: the drafter's weights.
            state: drafter state.
            tokens: `[B, M]` all tokens of each row so far, prompt included.
            lengths: `[B]` how many of them are real; the last one is the root.
            choose: how the target chooses its tokens.
            num_drafts: K, static.
        """
        ...

    def update(self, params: Any, state: Any, progress: Progress) -> Any:
        """Follows the target: after every piece of prompt, and after every verify pass, with what was accepted.

        Args:
            params: the drafter's weights.
            state: as `propose` returned it, or as the last update did where nothing was proposed.
            progress: what the target read. It is all that the drafter is told of prompts.
        """
        ...


class AutoregressiveHead(Protocol):
    """A draft head that reads a token and a hidden state at each position: see `models.heads.head.EagleHead`."""

    @property
    def config(self) -> Any: ...

    @property
    def policy(self) -> DTypePolicy: ...

    def init_cache(self, batch: int, max_len: int) -> Any: ...

    def window(self, cache: Any, num_tokens: Rows, width: int, offset: int | Array = 0) -> Any: ...

    def features(self, params: Any, hidden: tuple[Hidden, ...]) -> Hidden: ...

    def read(
        self, params: Any, layer: int, tokens: Tokens, hidden: Hidden, cache: Any, batch: Any
    ) -> tuple[Hidden, Any]: ...

    def logits(self, params: Any, hidden: Hidden) -> Array: ...


class BlockHead(Protocol):
    """A draft head that fills a block of masked positions at once: see `models.heads.head.DFlashHead`."""

    @property
    def config(self) -> Any: ...

    def init_cache(self, batch: int, max_len: int) -> Any: ...

    def read(self, params: Any, hidden: tuple[Hidden, ...], cache: Any, num_tokens: Rows) -> Any: ...

    def fill(self, params: Any, tokens: Tokens, cache: Any) -> tuple[Hidden, Any]: ...

    def logits(self, params: Any, hidden: Hidden) -> Array: ...


def require_head(drafter: str, head: Any, *, fills_blocks: bool) -> None:
    """Raises ValueError if `head` is not a `BlockHead`, or without `fills_blocks` not an `AutoregressiveHead`."""
    needed = ("config", "init_cache", "read", "logits", "fill" if fills_blocks else "features")
    lacks = [name for name in needed if not hasattr(head, name)]
    if lacks or (not fills_blocks and hasattr(head, "fill")):
        kind = "one that fills blocks, such as a DFlashHead" if fills_blocks else "one that is run on, an EagleHead"
        raise ValueError(f"{drafter} got a {type(head).__name__} as its head, expected {kind}: see load_drafter")


@flax.struct.dataclass
class Proposal:
    """What a drafter suggests.

    Attributes:
        tokens: `[B, K]`; columns at or past the row's count are ignored.
        counts: `[B]` 0..K.
        probs: `[B, K, V]` float32 the distribution each token was drawn from, None if it was chosen outright. Noise of
            the draws is independent of the target's: from `draw_keys` with `Purpose.DRAFT`, not from a `TokenChoice`.
            Siblings of a tree have that of their parent, from which they were drawn without replacement.
        state: the drafter's state after proposing.
        parents: `[B, K + 1]` of the verify tree, whose node 0 is the root and node k + 1 carries token k: see `Draft`.
            None for a chain. A NumPy array, such as `TreeTopology.rows` gives, is checked while tracing.
    """

    tokens: Tokens
    counts: Rows
    state: Any
    probs: Logits | None = None
    parents: Parents | None = None
