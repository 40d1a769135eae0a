"""Prompt lookup with alternatives: what followed each of the last times the text ended like this, as one tree."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Int32, Rows, Tokens
from mamba_spec_jax.speculative.drafters.ngram import check_ngrams, continuations, suffix_matches
from mamba_spec_jax.speculative.protocol import Progress, Proposal
from mamba_spec_jax.speculative.sampling import TokenChoice
from mamba_spec_jax.speculative.tree import select_best


@dataclasses.dataclass(frozen=True)
class NgramTreeDrafter:
    """Proposes what followed several earlier occurrences of the text's end, as the branches of a tree.

    Occurrences are ranked as `NgramDrafter` ranks them, by the length of the suffix that they match, then by recency;
    the best `max_branches` are continued as it continues the best one, which is proposed alone where there is no other.
    Branches share the nodes of their common beginning. The tree is filled up in the order of depth times rank, of
    equals the better rank first: the second branch goes half as deep as the first, the third a third as deep, and
    nodes saved by sharing make all of them deeper.

    Nothing is remembered between steps.

    Attributes:
        max_drafts: K, the most nodes besides the root.
        max_branches: most occurrences continued.
        max_ngram: longest suffix tried.
        min_ngram: shortest suffix tried.
    """

    max_drafts: int
    max_branches: int = 4
    max_ngram: int = 4
    min_ngram: int = 1

    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposes_trees: ClassVar[bool] = True

    def __post_init__(self):
        check_ngrams(self)
        if self.max_branches < 1:
            raise ValueError(f"NgramTreeDrafter.max_branches is {self.max_branches}, expected at least 1")

    def init(self, batch: int, max_len: int) -> tuple[()]:
        """No state."""
        return ()

    def propose(
        self, params: Any, state: tuple[()], tokens: Tokens, lengths: Rows, choose: TokenChoice | None, num_drafts: int
    ) -> Proposal:
        """Proposes a tree of `num_drafts` nodes, or none; arguments as `NgramDrafter.propose`'s."""
        if not 0 <= num_drafts <= self.max_drafts:
            raise ValueError(
                f"NgramTreeDrafter got num_drafts={num_drafts}, expected 0..{self.max_drafts} (max_drafts)"
            )
        width = tokens.shape[1]
        matched = suffix_matches(tokens, lengths, self.max_ngram)
        ranked, ends = jax.lax.top_k(
            matched * width + jnp.arange(width, dtype=jnp.int32)[None], min(self.max_branches, width)
        )
        found = ranked // width >= self.min_ngram  # [B, R]
        branches = continuations(tokens, lengths, ends, num_drafts)  # [B, R, K]
        candidates, parents, possible = _candidates(branches, found)
        tree = select_best(jnp.where(possible, jnp.float32(0), -jnp.inf), parents, num_drafts + 1)
        drafted = jnp.arange(num_drafts, dtype=jnp.int32)[None] < tree.counts[:, None]
        return Proposal(
            tokens=jnp.where(drafted, jnp.take_along_axis(candidates, tree.nodes[:, 1:], axis=1), 0),
            counts=tree.counts,
            state=state,
            parents=tree.parents,
        )

    def update(self, params: Any, state: tuple[()], progress: Progress) -> tuple[()]:
        """Nothing to follow: the emitted tokens come back with the next `propose`."""
        return state


def _candidates(branches: Int32[Array, "B R K"], found: Array) -> tuple[Tokens, Tokens, Array]:
    """Every node of every branch in the order in which they are taken, the root first.

    Returns:
        `[B, 1 + R K]` tokens (the root's is 0), parents, and whether a node exists: its branch was found, and no better
        one has it too.
    """
    B, R, K = branches.shape
    depth, rank = (grid.ravel() for grid in np.meshgrid(np.arange(K), np.arange(R)))
    order = np.lexsort((rank, (depth + 1) * (rank + 1)))
    place = np.empty((R, K), np.int32)
    place[rank[order], depth[order]] = 1 + np.arange(R * K)
    # Two branches share their first nodes, as far as they agree; a node belongs to the best branch that has it.
    agree = jnp.cumprod(branches[:, :, None] == branches[:, None], axis=-1, dtype=jnp.int32)  # [B, R, R, K]
    # [B, R, K]; the first of those that agree with branch r, at most r itself
    owner = jnp.argmax(agree, axis=1).astype(jnp.int32)
    above = jnp.asarray(place)[owner[..., :-1], np.arange(K - 1, dtype=np.int32)]
    above = jnp.concatenate([jnp.zeros((B, R, min(K, 1)), jnp.int32), above], axis=-1)
    possible = (owner == np.arange(R, dtype=np.int32)[None, :, None]) & found[..., None]

    def with_root(nodes: Array, root: Any) -> Array:
        return jnp.concatenate([jnp.full((B, 1), root, nodes.dtype), nodes[:, rank[order], depth[order]]], axis=1)

    return with_root(branches, 0), with_root(above, -1), with_root(possible, True)
