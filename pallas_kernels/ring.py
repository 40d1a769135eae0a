"""A ring of a recurrence's inputs per slot: what lets a verify pass leave the state where it is.

A slot's state is its checkpoint followed by the inputs of the tokens accepted since, its history. A verify pass computes
from both, and writes the inputs of its own tokens behind the history; accepting some of them is adding to a count. Only
when the ring fills up is the history folded into the checkpoint, in a pass that has read both anyway.

In the shapes below L is layers, S slots, Q the ring's length, B rows and T tokens of a pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Ring(NamedTuple):
    """The inputs since each slot's checkpoint.

    Attributes:
        inputs: pytree of `[L, S, Q, *x]`; entry `(start + i) % Q` of a slot is input i behind its checkpoint.
        starts: `[S]` int32, where each slot's history begins.
        counts: `[S]` int32, how many tokens it has.
    """

    inputs: Any
    starts: jax.Array
    counts: jax.Array

    @property
    def length(self) -> int:
        """Q."""
        return jax.tree.leaves(self.inputs)[0].shape[2]


def must_fold(counts: jax.Array, tokens: int, window: int, length: int) -> jax.Array:
    """Which rows fold their history in this pass, so that the next one, of `window` tokens at most, has room.

    With passes of `window` tokens this is FlashInfer's rule, `history + 2 T > Q`.
    """
    return counts + tokens + window > length


def rows_of(values: jax.Array, slots: jax.Array) -> jax.Array:
    """`values[slots[b]]` of each row, 0 where the slot is out of range."""
    index = jnp.where(slots >= 0, slots, values.shape[0])
    return values.at[index].get(mode="fill", fill_value=0)


def read_history(ring: Ring, layer: int, slots: jax.Array) -> Any:
    """The history of each row in one layer, oldest first: a pytree of `[B, Q, *x]`, with anything behind its count."""
    at = _entries(ring, slots, jnp.arange(ring.length, dtype=jnp.int32)[None])
    return jax.tree.map(lambda leaf: leaf.at[layer, jnp.maximum(slots, 0)[:, None], at].get(mode="clip"), ring.inputs)


def write_tokens(ring: Ring, layer: int, slots: jax.Array, tokens: Any) -> Ring:
    """The inputs of a pass, a pytree of `[B, T, *x]`, behind each row's history in one layer; counts stay."""
    (_, T, *_), (_, S, *_) = jax.tree.leaves(tokens)[0].shape, jax.tree.leaves(ring.inputs)[0].shape
    behind = rows_of(ring.counts, slots)[:, None] + jnp.arange(T, dtype=jnp.int32)
    at, slot = _entries(ring, slots, behind), jnp.where(slots >= 0, slots, S)[:, None]
    return ring._replace(
        inputs=jax.tree.map(
            lambda leaf, new: leaf.at[layer, slot, at].set(new.astype(leaf.dtype), mode="drop"), ring.inputs, tokens
        )
    )


def _entries(ring: Ring, slots: jax.Array, offsets: jax.Array) -> jax.Array:
    """`[B, n]` entries of the ring that lie `offsets` behind the start of each row's history."""
    return (rows_of(ring.starts, slots)[:, None] + offsets) % ring.length
