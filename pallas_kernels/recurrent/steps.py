"""A recurrence token by token, in plain JAX: along a chain, over a tree, and over the inputs that a ring keeps.

The state is rounded to its storage dtype after every token, as if each had been decoded on its own, and everything that
advances it uses the rule's `state_step`: so a chain, a tree and a replayed history agree to the bit.

In the shapes below B is the batch, T tokens, L layers; a state is `[B, H, P, N]`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.recurrent.rule import Rule


def step_scan(
    rule: Rule, h0: jax.Array, inputs: Any, num_tokens: jax.Array | None, snapshots: jax.Array | None, layer: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A chain: every output, the state after it, and the state after every token as `layer` of the snapshots.

    It is a scan even for one token: the compiled body is then the same for every T, and so are the bits. States go
    straight from the scan into the snapshots, which saves copying all of them.

    Args:
        rule: the recurrence.
        h0: `[B, H, P, N]` in the storage dtype.
        inputs: of the window, as the rule's.
        num_tokens: `[B]`; later tokens leave the state as it is, and their output is 0. None where the inputs
            themselves say which tokens change nothing.
        snapshots: `[L, B, T, H, P, N]`, or None to keep none.
        layer: which layer of the snapshots receives the states.

    Returns:
        outputs `[B, T, ...]` in float32, h `[B, H, P, N]` in the storage dtype, the snapshots.
    """

    def step(carry, per_token):
        h, snapshots = carry
        token, t = per_token
        after, y = _advance(rule, h, token)
        if num_tokens is not None:
            after = jnp.where(rows(t < num_tokens, after), after, h)
        if snapshots is not None:
            snapshots = snapshots.at[layer, :, t].set(after)
        return (after, snapshots), _real(y, t, num_tokens)

    (h, snapshots), y = loops.scan(step, (h0, snapshots), _numbered(rule, inputs))
    return jnp.moveaxis(y, 0, 1), h, snapshots


def step_tree(
    rule: Rule,
    h0: jax.Array,
    inputs: Any,
    num_tokens: jax.Array | None,
    parents: jax.Array,
    snapshots: jax.Array | None,
    layer: int,
) -> tuple[jax.Array, jax.Array | None]:
    """A tree: every node from its parent's state as it was stored, a root from h0; outputs and snapshots.

    Arguments as `step_scan`'s; parents `[B, T]`, -1 or an earlier node. Without snapshots the states of this layer are
    kept for as long as the layer runs.
    """
    B, T = parents.shape
    row = jnp.arange(B, dtype=jnp.int32)
    at = 0 if snapshots is None else layer
    states = jnp.zeros((1, B, T, *h0.shape[1:]), h0.dtype) if snapshots is None else snapshots

    def step(states, per_node):
        (token, t), parent = per_node
        before = states[at, row, jnp.maximum(parent, 0)]
        after, y = _advance(rule, jnp.where(rows(parent < 0, h0), h0, before), token)
        return states.at[at, :, t].set(after), _real(y, t, num_tokens)

    states, y = loops.scan(step, states, (_numbered(rule, inputs), parents.T))
    return jnp.moveaxis(y, 0, 1), None if snapshots is None else states


def fold(rule: Rule, h0: jax.Array, inputs: Any, num_tokens: jax.Array) -> jax.Array:
    """The state after each row's first `num_tokens[b]` tokens, with the bits of `step_scan`.

    Runs as many steps as the row with most tokens has; later columns of a row may hold anything. What only outputs need
    of the inputs is None.
    """
    tokens = rule.prepared(inputs)

    def step(t, h):
        token = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, t, keepdims=False), tokens)
        after = rule.state_step(h, token).astype(h.dtype)
        return jnp.where(rows(t < num_tokens, h), after, h)

    most = jnp.minimum(jnp.max(num_tokens, initial=0), inputs.values.shape[1])
    return loops.fori_loop(jnp.int32(0), most, step, h0)


def rows(flags: jax.Array, like: jax.Array) -> jax.Array:
    """`flags [B]` with the rank of `like [B, ...]`."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def _advance(rule: Rule, h: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
    """The state after one token, rounded to its storage dtype, and the output, which reads the unrounded one."""
    new = rule.state_step(h, token)
    return new.astype(h.dtype), rule.output(new, token)


def _real(y: jax.Array, t: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
    return y if num_tokens is None else jnp.where(rows(t < num_tokens, y), y, 0)


def _numbered(rule: Rule, inputs: Any) -> tuple[Any, jax.Array]:
    """What a loop over tokens reads: prepared tokens, and each one's index."""
    return rule.prepared(inputs), jnp.arange(inputs.values.shape[1], dtype=jnp.int32)
