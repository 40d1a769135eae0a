"""Which trees are drafted: fixed topologies, and the best nodes of a larger tree of candidates."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Int32, Parents, Rows
from pallas_kernels.tree import earlier_parents


@dataclasses.dataclass(frozen=True)
class TreeTopology:
    """A draft tree whose shape is static: hashable, and checked when it is made.

    Attributes:
        parents: of every node: -1 for the root, which is node 0, an earlier node for each of the others.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if not isinstance(self.parents, tuple) or not all(isinstance(parent, int) for parent in self.parents):
            raise ValueError(f"TreeTopology.parents is {self.parents!r}, expected a tuple of integers")
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"TreeTopology.parents is {self.parents}, expected -1, for the root, first")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"TreeTopology: node {node} has parent {parent}, expected 0..{node - 1}: a parent must come before "
                    "its child"
                )

    @classmethod
    def chain(cls, T: int) -> "TreeTopology":
        """T nodes, each the only child of the one before; a draft that leaves `parents` out is verified for less."""
        return cls(tuple(range(-1, T - 1)))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> "TreeTopology":
        """Every node at depth d gets `branching[d]` children; nodes in the order of their depth."""
        if any(children < 1 for children in branching):
            raise ValueError(
                f"TreeTopology.from_branching got {tuple(branching)}, expected at least 1 child everywhere"
            )
        parents, level = [-1], [0]
        for children in branching:
            next_level = range(len(parents), len(parents) + children * len(level))
            parents += [parent for parent in level for _ in range(children)]
            level = list(next_level)
        return cls(tuple(parents))

    @property
    def T(self) -> int:
        """Nodes, root included."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Edges between each node and the root."""
        found: list[int] = []
        for parent in self.parents:
            found.append(found[parent] + 1 if parent >= 0 else 0)
        return tuple(found)

    @property
    def depth(self) -> int:
        """The greatest depth: the most drafts that one pass accepts."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Nodes at the depth that has most of them."""
        return max(self.depths.count(depth) for depth in self.depths)

    def rows(self, batch: int) -> np.ndarray:
        """`[batch, T]` int32, for the `parents` of a `Draft` or `Proposal`; its values are known while tracing."""
        return np.tile(np.asarray(self.parents, np.int32), (batch, 1))


@flax.struct.dataclass
class SelectedTree:
    """The tree that `select_best` makes.

    Attributes:
        nodes: `[B, T]` the candidate that each node is; the root, candidate 0, first.
        parents: `[B, T]` as a `Draft` wants them.
        counts: `[B]` how many nodes besides the root are possible; they come first.
    """

    nodes: Int32[jax.Array, "B T"]
    parents: Parents
    counts: Rows


def select_best(joint_log_probs: Float[Array, "B N"], parents: Int32[Array, "B N"], T: int) -> SelectedTree:
    """The root and the T - 1 likeliest of N - 1 candidates, parents first: EAGLE-2's reranking (Li et al. 2024, 4.2).

    The likeliest nodes are a tree again, because a child is never likelier than its parent, and of equals the earlier
    node wins, which a parent is.

    Args:
        joint_log_probs: `[B, N]` summed log-probability of the drafts from the root to each candidate; not above its
            parent's. The root's is not looked at. Candidates at -inf are impossible and come last.
        parents: `[B, N]` candidates' parents, earlier candidates; -1 for candidate 0, the root.
        T: nodes of the result (static), 1..N.

    Raises:
        ValueError: shapes that disagree, or T out of range.
    """
    if joint_log_probs.ndim != 2 or parents.shape != joint_log_probs.shape:
        raise ValueError(
            f"select_best got joint_log_probs {list(joint_log_probs.shape)} and parents {list(parents.shape)}, "
            "expected [B, N] for both"
        )
    N = parents.shape[1]
    if not 1 <= T <= N:
        raise ValueError(f"select_best got T={T}, expected 1..{N}: there are {N} candidates, root included")
    score = joint_log_probs.at[:, 0].set(jnp.inf)
    best = jnp.argsort(-score, axis=1, stable=True)[:, :T].astype(jnp.int32)
    possible = jnp.take_along_axis(score, best, axis=1) > -jnp.inf
    # In the order of the candidates, hence parents first, and impossible ones last.
    order = jnp.argsort(jnp.where(possible, best, N + best), axis=1)
    nodes = jnp.take_along_axis(best, order, axis=1)
    wanted = jnp.take_along_axis(earlier_parents(parents), nodes, axis=1)
    matches = wanted[:, :, None] == nodes[:, None]  # [B, T, T]
    place = jnp.argmax(matches, axis=-1).astype(jnp.int32)
    counts = jnp.sum(possible, axis=1, dtype=jnp.int32) - 1
    real = jnp.arange(T, dtype=jnp.int32)[None] <= counts[:, None]
    return SelectedTree(nodes, jnp.where(real & jnp.any(matches, axis=-1), place, -1), counts)
