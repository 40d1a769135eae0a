"""A ring of a recurrence's inputs per slot: what lets a verify pass leave the state where it is.

A slot's state is its checkpoint followed by the inputs of the tokens accepted since, its history. A verify pass
computes from both, and writes the inputs of its own tokens behind the history; accepting some of them is adding to a
count. Only when the ring fills up is the history folded into the checkpoint, in a pass that has read both anyway.

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


def read_tokens(ring: Ring, layer: int | jax.Array, slots: jax.Array, offsets: jax.Array) -> Any:
    """Inputs of one layer that lie `offsets [B, n]` behind the start of each row's history: `[B, n, *x]`."""
    at = _entries(ring, slots, offsets)
    return jax.tree.map(lambda leaf: leaf.at[layer, jnp.maximum(slots, 0)[:, None], at].get(mode="clip"), ring.inputs)


def read_history(ring: Ring, layer: int, slots: jax.Array) -> Any:
    """The history of each row in one layer, oldest first: a pytree of `[B, Q, *x]`, with anything behind its count."""
    in_order = jnp.arange(ring.length, dtype=jnp.int32)[None]
    return read_tokens(ring, layer, slots, in_order)


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


def accept_path(ring: Ring, slots: jax.Array, path: jax.Array) -> Ring:
    """The inputs of an accepted path of a draft tree, moved up behind the history in every layer; counts stay.

    Node `path[b, d]` of the pass goes to where node d is; -1 stands behind the path, and moves nothing.
    """
    S = ring.starts.shape[0]
    history = rows_of(ring.counts, slots)[:, None]
    depth = jnp.arange(path.shape[1], dtype=jnp.int32)
    source, target = (_entries(ring, slots, history + node) for node in (jnp.maximum(path, 0), depth))
    from_slot = jnp.maximum(slots, 0)[:, None]
    to_slot = jnp.where((slots >= 0)[:, None] & (path >= 0) & (path != depth), slots[:, None], S)

    def move(leaf):
        # Read into a buffer of its own: the scatter would otherwise read what it has already written over.
        tokens = jax.lax.optimization_barrier(leaf.at[:, from_slot, source].get(mode="clip"))
        return leaf.at[:, to_slot, target].set(tokens, mode="drop")

    return ring._replace(inputs=jax.tree.map(move, ring.inputs))


def extend(ring: Ring, slots: jax.Array, folded: jax.Array, accepted: jax.Array) -> Ring:
    """Drops the history of the rows that a pass has `folded`, and adds the first `accepted[b]` inputs of that pass."""
    index = jnp.where(slots >= 0, slots, ring.starts.shape[0])
    history = rows_of(ring.counts, slots)
    starts = (rows_of(ring.starts, slots) + jnp.where(folded, history, 0)) % ring.length
    counts = jnp.where(folded, 0, history) + accepted
    return ring._replace(
        starts=ring.starts.at[index].set(starts, mode="drop"), counts=ring.counts.at[index].set(counts, mode="drop")
    )


def clear(ring: Ring, slots: jax.Array) -> Ring:
    """Forgets the history of `slots`; what is out of range is ignored."""
    index = jnp.where(slots >= 0, slots, ring.starts.shape[0])
    return ring._replace(counts=ring.counts.at[index].set(0, mode="drop"))


def _entries(ring: Ring, slots: jax.Array, offsets: jax.Array) -> jax.Array:
    """`[B, n]` entries of the ring that lie `offsets` behind the start of each row's history."""
    return (rows_of(ring.starts, slots)[:, None] + offsets) % ring.length
