"""What goes into a verify pass and what comes out of it."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Parents, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.modes import CommitStrategy, ForwardMode


@flax.struct.dataclass
class Draft:
    """Proposed tokens per row, behind the row's root: a chain, or a tree.

    Attributes:
        tokens: `[B, T]`; column 0 is the root, the row's last emitted token, not yet in the cache.
        lengths: `[B]` drafted tokens of each row, 0..T-1, the root not counted; columns past them are ignored.
        slots: `[B]` cache slot of each row, -1 for a padding row.
        probs: `[B, T-1, V]` the distribution each draft was drawn from, or None if drafts were chosen outright. On a
            tree, the drafter's distribution after the node's parent, from which siblings are drawn without replacement.
        parents: `[B, T]` each node's parent, an earlier node; -1 at the root, and at nodes that must not be accepted.
            None for a chain, which is statically the cheaper path. See `cache/tree.py`.
    """

    tokens: Tokens
    lengths: Rows
    slots: Rows
    probs: Float[jax.Array, "B K V"] | None = None
    parents: Parents | None = None

    @property
    def num_tokens(self) -> Rows:
        """`[B]` tokens the verify pass reads in each row, root included; 0 for padding rows."""
        return jnp.where(self.slots >= 0, jnp.clip(self.lengths, 0, self.tokens.shape[1] - 1) + 1, 0)


@dataclasses.dataclass(frozen=True)
class RecordSpec:
    """Who made a record: the static side that the commit compares.

    Attributes:
        backend: the recurrent backend's static spec.
        mode: the pass that ran.
        strategy: what the record keeps.
    """

    backend: Hashable
    mode: ForwardMode
    strategy: CommitStrategy

    def __str__(self) -> str:
        return f"{self.backend} in {self.mode.name} with {self.strategy.name}"


@flax.struct.dataclass
class VerifyRecord:
    """Everything the commit needs to know of a verify pass.

    Attributes:
        slots: `[B]` cache slot of each row, -1 for padding.
        num_tokens: `[B]` tokens that were real in each row; later nodes cannot be committed.
        recurrent: what the strategy keeps. SNAPSHOT: `[L, B, T, H, P, N]` states. REPLAY, which has the inputs in the
            pool's ring: what of every layer's weights it takes to fold them.
        conv_inputs: `[L, B, T, C]` raw convolution inputs.
        spec: who made it (static).
        parents: `[B, T]` of the verified tree, None for a chain.
    """

    slots: Rows
    num_tokens: Rows
    recurrent: Any
    conv_inputs: Float[jax.Array, "L B T C"]
    spec: RecordSpec = flax.struct.field(pytree_node=False)
    parents: Parents | None = None


@flax.struct.dataclass
class ModelOutput:
    """What one pass of a model returns.

    Attributes:
        logits: `[B, T, V]` float32 for a verify, `[B, V]` of each row's last token for prefill and decode.
        cache: after prefill or decode the advanced cache; after a verify the same pools, awaiting their commit.
        record: what the commit needs, None after prefill and decode.
        hidden: `[B, T, D]` for each layer that was asked for.
    """

    logits: Array
    cache: HybridCache
    record: VerifyRecord | None = None
    hidden: tuple[Array, ...] = ()
