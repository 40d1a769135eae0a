"""EAGLE-2's dynamic draft trees: what a head finds likely is expanded, and the likeliest nodes of all are verified."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Int32, Rows, Tokens
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter, EagleState
from mamba_spec_jax.speculative.protocol import AutoregressiveHead, Progress, Proposal, require_head
from mamba_spec_jax.speculative.sampling import TokenChoice
from mamba_spec_jax.speculative.tree import select_best
from pallas_kernels.arithmetic import log_softmax
from pallas_kernels.tree import ancestor_mask


@dataclasses.dataclass(frozen=True)
class EagleTreeDrafter:
    """Drafts a tree with a head of one layer (EAGLE-2, Li et al. 2024).

    Level by level, the `width` likeliest nodes are run on, and each gets `width` children; of all these candidates the
    `max_drafts` with the greatest joint probability under the head are proposed. Where tokens are drawn, a node's
    children are the tokens whose perturbed scores are the greatest (see `TokenChoice`): its first child is what the
    target would draw if it agreed with the head, and the others are draws without replacement.

    Attributes:
        head: the static side of the head.
        max_drafts: K, nodes besides the root.
        depth: levels of the tree.
        width: nodes of a level that are run on, and children of each.
    """

    head: AutoregressiveHead
    max_drafts: int
    depth: int = 4
    width: int = 4
    proposes_trees: ClassVar[bool] = True

    def __post_init__(self):
        require_head("EagleTreeDrafter", self.head, fills_blocks=False)
        if self.head.config.num_layers != 1:
            raise ValueError(
                f"EagleTreeDrafter got a head of {self.head.config.num_layers} layers, expected one that is run on"
            )
        if self.depth < 1 or self.width < 1:
            raise ValueError(f"EagleTreeDrafter got depth={self.depth}, width={self.width}, expected at least 1")
        if not 1 <= self.max_drafts <= self._num_candidates - 1:
            raise ValueError(
                f"EagleTreeDrafter.max_drafts is {self.max_drafts}, expected 1..{self._num_candidates - 1}: there are "
                f"no more candidates with depth={self.depth}, width={self.width}"
            )

    @property
    def vocab_size(self) -> int:
        return self.head.config.vocab_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._chain.hidden_layers

    def init(self, batch: int, max_len: int) -> EagleState:
        """A head that has read nothing."""
        return self._chain.init(batch, max_len)

    def propose(
        self, params: Any, state: EagleState, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` nodes in every row; arguments as `Drafter.propose`'s."""
        B, W = lengths.size, self.width
        rows = jnp.arange(B, dtype=jnp.int32)[:, None]
        candidates = _Candidates.root(B)
        # The nodes that are run on at a level, as candidates, and what the head says there; first the root alone.
        nodes, hidden, cache = jnp.zeros((B, 1), jnp.int32), state.hidden, state.cache
        run_on: list[Int32[Array, "B W"]] = []
        for level in range(self.depth):
            if level:
                joint = candidates.joint[:, -candidates.newest :]
                best = jax.lax.top_k(joint, W)[1].astype(jnp.int32)
                parent_place = best // W  # among the nodes of the level before
                nodes = best + candidates.joint.shape[1] - candidates.newest
                run_on.append(nodes)
                source = jnp.take_along_axis(hidden, parent_place[..., None], axis=1)
                batch = self._level(cache, candidates, run_on)
                token = jnp.take_along_axis(candidates.tokens, nodes, axis=1)
                hidden, cache = self.head.read(params, 0, token, source, cache, batch)
            logits = self.head.logits(params, hidden)
            positions = jnp.broadcast_to(lengths[:, None] + level, nodes.shape)
            children = jax.lax.top_k(choose.scores(logits, positions), W)[1].astype(jnp.int32)
            own = jnp.take_along_axis(log_softmax(logits), children, axis=-1)
            joint = jnp.take_along_axis(candidates.joint, nodes, axis=1)[..., None] + own
            candidates = candidates.extended(children, joint, nodes)
        tree = select_best(candidates.joint, candidates.parents, num_drafts + 1)
        return Proposal(
            tokens=candidates.tokens[rows, tree.nodes[:, 1:]],
            counts=tree.counts,
            state=dataclasses.replace(state, cache=cache),
            parents=tree.parents,
        )

    def update(self, params: Any, state: EagleState, progress: Progress) -> EagleState:
        """Reads what was accepted; whatever was drafted beyond it is written over later."""
        return self._chain.update(params, state, progress)

    @property
    def _chain(self) -> EagleDrafter:
        """The drafter of chains that follows the text in the same way."""
        return EagleDrafter(self.head, self.max_drafts)

    @property
    def _num_candidates(self) -> int:
        return 1 + self.width + (self.depth - 1) * self.width**2

    def _level(self, cache: Any, candidates: "_Candidates", run_on: list[Int32[Array, "B W"]]) -> Any:
        """The newest nodes that are run on, as a window: they see what was read for good and their own ancestors.

        Keys of a level follow those of the levels before it.
        """
        seen = jnp.concatenate(run_on, axis=1)
        B, before = seen.shape[0], seen.shape[1] - self.width
        batch = self.head.window(cache, jnp.full((B,), self.width, jnp.int32), self.width)
        above = jnp.take_along_axis(ancestor_mask(candidates.parents), run_on[-1][..., None], axis=1)
        visible = jnp.take_along_axis(above, jnp.broadcast_to(seen[:, None], (B, self.width, seen.shape[1])), axis=2)
        depth = len(run_on) - 1
        return dataclasses.replace(
            batch,
            positions=jnp.broadcast_to(cache.lengths[:, None] + depth, (B, self.width)),
            ancestors=visible,
            offset=before,
        )


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Every node drafted so far, the root first.

    Attributes:
        tokens, parents, joint: `[B, N]` token, parent's index, and joint log-probability under the head.
        newest: nodes of the last level (static).
    """

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    joint: Array
    newest: int

    @classmethod
    def root(cls, batch: int) -> "_Candidates":
        zeros = jnp.zeros((batch, 1), jnp.int32)
        return cls(zeros, zeros - 1, zeros.astype(jnp.float32), 1)

    def extended(self, children: Array, joint: Array, parents: Array) -> "_Candidates":
        """With `children [B, n, W]` of the nodes `parents [B, n]`."""
        above = jnp.broadcast_to(parents[..., None], children.shape)

        def join(old, new):
            return jnp.concatenate([old, new.reshape(old.shape[0], -1)], axis=1)

        newest = children.shape[1] * children.shape[2]
        return _Candidates(join(self.tokens, children), join(self.parents, above), join(self.joint, joint), newest)
