"""Verify trees as arrays: `parents [B, T]` int32, -1 at a root and an earlier node everywhere else."""

import jax
import jax.numpy as jnp

from pallas_kernels.state_commit.window import earlier


def earlier_parents(parents: jax.Array) -> jax.Array:
    """The parents as int32, -1 where one is not an earlier node."""
    parents = jnp.asarray(parents, jnp.int32)
    return earlier(parents, jax.lax.broadcasted_iota(jnp.int32, parents.shape, parents.ndim - 1))


def ancestor_mask(parents: jax.Array) -> jax.Array:
    """`[B, T, T]`: `[b, t, j]` whether node j is on the path from the root to node t, t itself included."""
    jump = earlier_parents(parents)
    T = jump.shape[-1]
    mask = jnp.broadcast_to(jnp.eye(T, dtype=bool), (*jump.shape, T))
    # Each round doubles how far back a node has looked, and how far its next jump goes.
    for _ in range((T - 1).bit_length()):
        target = jnp.maximum(jump, 0)
        mask |= jnp.take_along_axis(mask, target[..., None], axis=-2) & (jump >= 0)[..., None]
        jump = jnp.where(jump >= 0, jnp.take_along_axis(jump, target, axis=-1), -1)
    return mask
