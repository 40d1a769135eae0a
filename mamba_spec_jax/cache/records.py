"""What goes into a verify pass and what comes out of it."""

import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Parents, Rows, Tokens, require_array
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.tree import Tree, check_parents
from mamba_spec_jax.modes import CommitStrategy, ForwardMode
from pallas_kernels.tree import earlier_parents


@flax.struct.dataclass
class Draft:
    """Each row's root and the tokens proposed after it: a chain, or a tree.

    Attributes:
        tokens: `[B, T]`; column 0 is the root, the row's last emitted token, not yet in the cache.
        counts: `[B]` drafted tokens of each row, 0..T-1, the root not counted; columns past them are ignored. Numbers
            out of that range count as the nearest in it.
        slots: `[B]` cache slot of each row, -1 for a padding row.
        probs: `[B, T-1, V]` the distribution each draft was drawn from, or None if drafts were chosen outright. On a
            tree, the drafter's distribution after the node's parent, from which siblings are drawn without replacement.
        parents: `[B, T]` each node's parent, an earlier node; -1 at the root, and at nodes that must not be accepted.
            None for a chain, which is statically the cheaper path. See `cache/tree.py`.
    """

    tokens: Tokens
    counts: Rows
    slots: Rows
    probs: Float[jax.Array, "B K V"] | None = None
    parents: Parents | None = None

    @property
    def num_tokens(self) -> Rows:
        """`[B]` tokens the verify pass reads in each row, root included; 0 for padding rows."""
        return jnp.where(self.slots >= 0, jnp.clip(self.counts, 0, self.tokens.shape[1] - 1) + 1, 0)

    def within(self, vocab_size: int) -> "Draft":
        """The draft without whatever a model of `vocab_size` tokens cannot read, which no acceptance could emit.

        A chain ends before its first token outside the vocabulary; in a tree, such a node and all that hangs on it
        are cut off. Counts are brought to 0..T-1, and a parent that is not an earlier node becomes -1. The root is
        left as it is: it is the text's last token, not a draft.
        """
        tokens = jnp.asarray(self.tokens, jnp.int32)
        exists = ((tokens >= 0) & (tokens < vocab_size)).at[:, 0].set(True)
        counts = jnp.clip(self.counts, 0, tokens.shape[1] - 1).astype(jnp.int32)
        parents = self.parents
        if parents is None:
            leading = jnp.sum(jnp.cumprod(exists[:, 1:], axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
            counts = jnp.minimum(counts, leading)
        else:
            parents = jnp.where(exists, earlier_parents(parents), -1)
        return dataclasses.replace(self, tokens=jnp.where(exists, tokens, 0), counts=counts, parents=parents)


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

    def differences(self, other: "RecordSpec") -> str:
        """Each field that the two have otherwise, as `name: this one's against the other's`."""
        return "; ".join(f"{name}: {mine} against {theirs}" for name, mine, theirs in _differences(self, other, ""))


@flax.struct.dataclass
class VerifyRecord:
    """Everything the commit needs to know of a verify pass.

    Attributes:
        slots: `[B]` cache slot of each row, -1 for padding.
        num_tokens: `[B]` tokens that were real in each row; later nodes cannot be committed.
        held: `[B]` tokens that each row's slot held before the pass; the commit leaves a slot that holds another
            number alone, since the record is then not of its last pass.
        recurrent: what the strategy keeps. SNAPSHOT: `[L, B, T, H, P, N]` states. REPLAY, which has the inputs in the
            pool's ring: by name, an array of each layer's weights that it takes to fold them.
        conv_inputs: `[L, B, T, C]` raw convolution inputs.
        spec: who made it (static).
        tree: what was verified, None for a chain.
        layers: what has been filled in so far (static): the id of a layer and which of its two kinds of inputs came.
    """

    slots: Rows
    num_tokens: Rows
    held: Rows
    recurrent: Any
    conv_inputs: Float[jax.Array, "L B T C"]
    spec: RecordSpec = flax.struct.field(pytree_node=False)
    tree: Tree | None = None
    layers: tuple[tuple[int, str], ...] = flax.struct.field(pytree_node=False, default=())

    def path_to(self, nodes: Rows) -> tuple[Tokens, Rows]:
        """`[B, T]` nodes from the root to `nodes[b]`, then -1 on a tree and any node on a chain; and their number."""
        if self.tree is None:
            T = self.conv_inputs.shape[2]
            return jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (nodes.size, T)), nodes + 1
        path = self.tree.path_to(nodes)
        return path, jnp.sum(path >= 0, axis=1, dtype=jnp.int32)


class CommitBackend(Protocol):
    """The owner of the post-verify commit."""

    def update_mamba_state_after_mtp_verify(
        self,
        cache: HybridCache,
        record: VerifyRecord,
        last_correct_step_indices: Rows,
        mamba_track_indices: Rows | None = None,
        mamba_steps_to_track: Rows | None = None,
    ) -> HybridCache:
        """Brings every row's slot to its accepted path; see `HybridLinearAttnBackend`, whose arguments they are.

        A backend may have further options, by keyword and with a default.
        """
        ...


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


def require_draft(caller: str, draft: Any) -> None:
    """Raises ValueError (while tracing) for what is no draft, or one whose arrays do not fit each other."""
    if not isinstance(draft, Draft):
        raise ValueError(f"{caller} got a draft of type {type(draft).__name__}, expected a Draft")
    require_array(f"{caller} got draft.tokens", draft.tokens, ("B", "T"))
    batch, nodes = draft.tokens.shape
    require_array(f"{caller} got draft.counts", draft.counts, (batch,))
    require_array(f"{caller} got draft.slots", draft.slots, (batch,))
    if draft.probs is not None:
        require_array(f"{caller} got draft.probs", draft.probs, (batch, nodes - 1, "V"), "float32")
    if draft.parents is not None:
        check_parents(caller, draft.parents, (batch, nodes))


def require_record(caller: str, record: Any) -> VerifyRecord:
    """The record; raises ValueError (while tracing) unless it is what `init_record` made."""
    if not isinstance(record, VerifyRecord):
        raise ValueError(
            f"{caller} got a record of type {type(record).__name__}, expected the VerifyRecord of the verify pass: "
            "ModelOutput.record, or what init_record made and every layer's forward passed on"
        )
    return record


def _differences(mine: Any, theirs: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    if mine == theirs:
        return
    if dataclasses.is_dataclass(mine) and type(mine) is type(theirs):
        for field in dataclasses.fields(mine):
            path = f"{name}.{field.name}" if name else field.name
            yield from _differences(getattr(mine, field.name), getattr(theirs, field.name), path)
    else:
        yield name, mine, theirs
