"""Draft trees as arrays: ancestors, depths, and the path to a node.

A tree of T nodes is its `parents [B, T]`: -1 at the root, which is node 0, and an earlier node everywhere else, so the
nodes of a path ascend. A node whose parent is -1 or not an earlier one is detached: it is never accepted, and neither
are its descendants.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Ancestors, Int32, Parents, Rows, require_array
from pallas_kernels.tree import ancestor_mask, earlier_parents


@flax.struct.dataclass
class Tree:
    """The trees of one verify pass, one a row, with what follows from their parents computed once.

    Attributes:
        parents: `[B, T]` int32, -1 at the root and at detached nodes.
        ancestors: `[B, T, T]`: `[b, t, j]` whether node j is on the path from the root to node t, t itself included.
    """

    parents: Parents
    ancestors: Ancestors

    @classmethod
    def create(cls, parents: Parents) -> "Tree":
        """Detaches the nodes whose parent is not an earlier one."""
        return cls(earlier_parents(parents), ancestor_mask(parents))

    @property
    def depths(self) -> Int32[jax.Array, "B T"]:
        """Edges between each node and its root, 0 at the root."""
        return jnp.sum(self.ancestors, axis=-1, dtype=jnp.int32) - 1

    def path_to(self, node: Rows) -> Int32[jax.Array, "B T"]:
        """The nodes from the root to `node[b]`, then -1; all -1 where there is no such node."""
        T = self.parents.shape[1]
        nodes = jnp.arange(T, dtype=jnp.int32)
        exists = (node >= 0) & (node < T)
        on_path = jnp.take_along_axis(self.ancestors, jnp.clip(node, 0, T - 1)[:, None, None], axis=1)[:, 0]
        on_path &= exists[:, None]
        here = on_path[:, None] & (self.depths[:, None] == nodes[None, :, None])  # [B, depth, node]
        return jnp.max(jnp.where(here, nodes[None, None], -1), axis=-1)


def check_parents(caller: str, parents: Any, shape: tuple[int, ...]) -> None:
    """Refuses parents of another shape or dtype and, wherever their values are known, parents that are not a tree.

    Values are known of NumPy arrays, such as a `TreeTopology` gives, while tracing too, and of all arrays outside jit.

    Args:
        caller: who asks, for the message.
        parents: `[B, T]`.
        shape: `(B, T)`.

    Raises:
        ValueError: naming each node whose parent does not come before it.
    """
    require_array(f"{caller} got parents", parents, shape)
    if isinstance(parents, jax.core.Tracer):
        return
    values = np.asarray(parents)
    late = (values < -1) | (values >= np.arange(shape[1]))
    if late.any():
        problems = "; ".join(f"parents[{b}, {t}] is {values[b, t]}, expected -1..{t - 1}" for b, t in np.argwhere(late))
        raise ValueError(f"{caller}: a parent must come before its child, and the root has none (-1): {problems}")
