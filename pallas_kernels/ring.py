"""A ring of a recurrence's inputs per slot: what lets a verify pass leave the state where it is.

A slot's state is its checkpoint followed by the inputs of the tokens accepted since, its history. A verify pass
computes from both, and writes the inputs of its own tokens after the history; accepting some of them only adds to a
count. Only when the ring fills up is the history folded into the checkpoint, in a pass that has read both anyway.
Inputs are never copied: `order[slot]` lists a slot's ring entries, oldest first, and accepting a path of a draft tree
changes that list.

In the shapes below L is layers, S slots, Q the ring's length, B rows and T tokens of a pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Ring(NamedTuple):
    """The inputs since each slot's checkpoint.

    Attributes:
        inputs: pytree of `[L, S, Q, *x]`; entry `order[slot, (start + i) % Q]` is input i after a slot's checkpoint.
        starts: `[S]` int32, where each slot's history begins.
        counts: `[S]` int32, how many tokens it has.
        order: `[S, Q]` int32, a permutation of 0..Q-1 for each slot, the same for every layer.
    """

    inputs: Any
    starts: jax.Array
    counts: jax.Array
    order: jax.Array

    @classmethod
    def empty(cls, inputs: Any) -> "Ring":
        """Without history, in new buffers, each of which can be donated."""
        _, S, Q, *_ = jax.tree.leaves(inputs)[0].shape
        order = jnp.tile(jnp.arange(Q, dtype=jnp.int32), (S, 1))
        return cls(inputs, starts=jnp.zeros(S, jnp.int32), counts=jnp.zeros(S, jnp.int32), order=order)

    @property
    def length(self) -> int:
        """Q."""
        return self.order.shape[1]


def must_fold(counts: jax.Array, tokens: int, window: int, length: int) -> jax.Array:
    """Which rows fold their history in this pass, so that the next one, of `window` tokens at most, has room.

    With passes of `window` tokens this is FlashInfer's rule, `history + 2 T > Q`.
    """
    return counts + tokens + window > length


def rows_of(values: jax.Array, slots: jax.Array) -> jax.Array:
    """`values[slots[b]]` of each row, of `values [S, ...]`; 0 where the slot is out of range."""
    index = jnp.where(slots >= 0, slots, values.shape[0])
    return values.at[index].get(mode="fill", fill_value=0)


def entries(ring: Ring, slots: jax.Array, offsets: jax.Array) -> jax.Array:
    """`[B, n]` entries of the inputs `offsets [B, n]` after the start of each row's history."""
    return jnp.take_along_axis(rows_of(ring.order, slots), _places(ring, slots, offsets), axis=1, mode="clip")


def read_entries(ring: Ring, layer: int | jax.Array, slots: jax.Array, at: jax.Array) -> Any:
    """The inputs in some `entries [B, n]` of each row's ring in one layer: `[B, n, *x]`."""
    return jax.tree.map(lambda leaf: leaf.at[layer, jnp.maximum(slots, 0)[:, None], at].get(mode="clip"), ring.inputs)


def read_history(ring: Ring, layer: int | jax.Array, slots: jax.Array) -> Any:
    """The history of each row in one layer, oldest first: a pytree of `[B, Q, *x]`, with anything after its count."""
    in_order = jnp.arange(ring.length, dtype=jnp.int32)[None]
    return read_entries(ring, layer, slots, entries(ring, slots, in_order))


def write_tokens(ring: Ring, layer: int, slots: jax.Array, tokens: Any) -> Ring:
    """Writes a pass's inputs, a pytree of `[B, T, *x]`, after each row's history in one layer; counts do not change."""
    T, S = jax.tree.leaves(tokens)[0].shape[1], ring.starts.shape[0]
    at, slot = entries(ring, slots, _behind(ring, slots, T)), jnp.where(slots >= 0, slots, S)[:, None]
    return ring._replace(
        inputs=jax.tree.map(
            lambda leaf, new: leaf.at[layer, slot, at].set(new.astype(leaf.dtype), mode="drop"), ring.inputs, tokens
        )
    )


def accept_path(ring: Ring, slots: jax.Array, path: jax.Array) -> Ring:
    """Orders the nodes of an accepted path of a draft tree after the history, and the others after them.

    No input moves: the order of the window's T entries changes, and stays a permutation whatever the path is. Rows
    whose slot is out of range change nothing. Two rows with one slot leave its order undefined until it is `reset`.

    Args:
        ring: as the pass has left it; donate it.
        slots: `[B]`.
        path: `[B, T]` int32, the pass's node at each depth; -1 after the path's end.
    """
    S, T = ring.starts.shape[0], path.shape[1]
    nodes = jnp.arange(T, dtype=jnp.int32)
    depth = jnp.max(jnp.where(path[:, :, None] == nodes[None, None], nodes[None, :, None], -1), axis=1)
    turn = jnp.where(depth >= 0, depth, T + nodes[None])  # no two nodes have the same
    place = jnp.sum(turn[:, None, :] < turn[:, :, None], axis=2, dtype=jnp.int32)
    behind, slot = _behind(ring, slots, T), jnp.where(slots >= 0, slots, S)[:, None]
    target = _places(ring, slots, behind[:, :1] + place)
    return ring._replace(order=ring.order.at[slot, target].set(entries(ring, slots, behind), mode="drop"))


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


def reset(ring: Ring, slots: jax.Array) -> Ring:
    """Leaves `slots` without history and in an order to begin with, whatever they held; ignores what is out of range.

    `clear` keeps the order, and so waits for nobody who reads by it.
    """
    index = jnp.where(slots >= 0, slots, ring.starts.shape[0])
    order = ring.order.at[index].set(jnp.arange(ring.length, dtype=jnp.int32)[None], mode="drop")
    return clear(ring, slots)._replace(order=order)


def _behind(ring: Ring, slots: jax.Array, tokens: int) -> jax.Array:
    """`[B, T]` offsets of a pass's tokens: they follow each row's history."""
    return rows_of(ring.counts, slots)[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]


def _places(ring: Ring, slots: jax.Array, offsets: jax.Array) -> jax.Array:
    """`[B, n]` columns of the order that are `offsets` after the start of each row's history."""
    return (rows_of(ring.starts, slots)[:, None] + offsets) % ring.length
