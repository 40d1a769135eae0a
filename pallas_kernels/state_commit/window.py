"""Where each column of a convolution window comes from after a node of a verify tree.

The window after a node is the last W-1 of the slot's old window followed by the inputs along the path from the root to
that node. A tap is a position in `old window (W-1) ++ inputs (T)`: below W-1 it is an old column, else an input.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def taps(node: jax.Array, parent_of: Callable[[jax.Array], jax.Array], width: int) -> list[jax.Array]:
    """The W-1 taps, oldest first, of the window after `node` (any shape, `>= 0`); parent_of gives -1 at the root.

    Walks at most W-1 ancestors, so that it costs the same however long the path is. Every implementation uses it.
    """
    path = []
    for _ in range(width):
        path.append(node)
        node = jnp.where(node >= 0, parent_of(jnp.maximum(node, 0)), -1)
    length = sum((ancestor >= 0).astype(jnp.int32) for ancestor in path)
    backwards = path[::-1]
    return [jnp.where(backwards[j] >= 0, width + backwards[j], j + length) for j in range(width)]


def earlier(parent: jax.Array, node: jax.Array) -> jax.Array:
    """The parent, or -1 unless it is an earlier node, as it must be: nothing is read out of bounds."""
    return jnp.where((parent >= 0) & (parent < node), parent, -1)
