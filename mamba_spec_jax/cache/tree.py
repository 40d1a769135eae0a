"""Draft trees as arrays: ancestors, depths, and the path to a node.

A tree of T nodes is its `parents [B, T]`: -1 at the root, which is node 0, and an earlier node everywhere else, so the
nodes of a path ascend. A node whose parent is -1 or not an earlier one is detached: it is never accepted, and neither
are its descendants.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Int32, Parents, Rows, require_array
from pallas_kernels.tree import ancestor_mask


def depths(parents: Parents) -> Int32[jax.Array, "B T"]:
    """Edges between each node and its root, 0 at the root."""
    return jnp.sum(ancestor_mask(parents), axis=-1, dtype=jnp.int32) - 1


def path_to(parents: Parents, node: Rows, width: int) -> Int32[jax.Array, "B width"]:
    """The nodes from the root to `node[b]`, then -1; all -1 where there is no such node.

    Args:
        parents: `[B, T]`.
        node: `[B]`.
        width: columns of the result (static); a longer path is truncated.
    """
    mask = ancestor_mask(parents)
    T = mask.shape[-1]
    nodes = jnp.arange(T, dtype=jnp.int32)
    exists = (node >= 0) & (node < T)
    on_path = jnp.take_along_axis(mask, jnp.clip(node, 0, T - 1)[:, None, None], axis=1)[:, 0] & exists[:, None]
    depth = jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1
    here = on_path[:, None] & (depth[:, None] == jnp.arange(width, dtype=jnp.int32)[None, :, None])  # [B, width, T]
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
