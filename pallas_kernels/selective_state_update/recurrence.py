"""Mamba-2's recurrence token by token (Dao and Gu 2024), in float32.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h: [P, N] per head

In the shapes below B is the batch, T tokens, H heads, P head dim, N state, G groups; head h reads group h // (H/G). The
state is rounded to its storage dtype after every token, as if each had been decoded on its own, and everything that
advances it uses `state_step`: so a chain, a tree and a replayed history agree to the bit.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.arithmetic import alike, contract, rounded
from pallas_kernels.selection import finite


class SSMInputs(NamedTuple):
    """What the recurrence reads: x `[B, T, H, P]`, dt `[B, T, H]`, B and C `[B, T, G, N]`; C None gives no outputs."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: Any


def state_step(h: jax.Array, token: SSMInputs, decay: jax.Array) -> jax.Array:
    """One token (no T axis): `h [B, H, P, N]` in its storage dtype, `decay [B, H]`; the result in float32."""
    B = _per_head(token.B, h.shape[1])
    x, B = (jnp.where((token.dt == 0)[..., None], finite(leaf), leaf) for leaf in (token.x, B))  # no token there
    injected = (token.dt[..., None] * x)[..., None] * B[:, :, None, :]
    return rounded(h.astype(jnp.float32) * decay[..., None, None]) + rounded(injected)


def step_scan(
    h0: jax.Array, inputs: SSMInputs, A: jax.Array, D: jax.Array, snapshots: jax.Array | None, layer: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """A chain: every output, the state after it, and the state after every token as `layer` of the snapshots.

    It is a scan even for one token: the compiled body is then the same for every T, and so are the bits. States go
    straight from the scan into the snapshots, which saves copying all of them.

    Args:
        h0: `[B, H, P, N]` in the storage dtype.
        inputs: of the window.
        A, D: `[H]`.
        snapshots: `[L, B, T, H, P, N]`, or None to keep none.
        layer: which layer of the snapshots receives the states.

    Returns:
        y `[B, T, H, P]` in float32, h `[B, H, P, N]` in the storage dtype, the snapshots.
    """

    def step(carry, per_token):
        h, snapshots = carry
        token, decay, t = per_token
        h, y = _advance(h, token, decay, D)
        if snapshots is not None:
            snapshots = snapshots.at[layer, :, t].set(h)
        return (h, snapshots), y

    (h, snapshots), y = loops.scan(step, (h0, snapshots), _scanned(inputs, A))
    return jnp.moveaxis(y, 0, 1), h, snapshots


def step_tree(
    h0: jax.Array,
    inputs: SSMInputs,
    A: jax.Array,
    D: jax.Array,
    parents: jax.Array,
    snapshots: jax.Array | None,
    layer: int,
) -> tuple[jax.Array, jax.Array | None]:
    """A tree: every node from its parent's state as it was stored, a root from h0; outputs and snapshots.

    Arguments as `step_scan`'s; parents `[B, T]`, -1 or an earlier node. Without snapshots the states of this layer are
    kept for as long as the layer runs.
    """
    B, T = parents.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    at = 0 if snapshots is None else layer
    states = jnp.zeros((1, B, T, *h0.shape[1:]), h0.dtype) if snapshots is None else snapshots

    def step(states, per_node):
        (token, decay, t), parent = per_node
        before = states[at, rows, jnp.maximum(parent, 0)]
        h, y = _advance(jnp.where((parent < 0)[:, None, None, None], h0, before), token, decay, D)
        return states.at[at, :, t].set(h), y

    states, y = loops.scan(step, states, (_scanned(inputs, A), parents.T))
    return jnp.moveaxis(y, 0, 1), None if snapshots is None else states


def fold(h0: jax.Array, inputs: SSMInputs, A: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """The state after each row's first `num_tokens[b]` tokens, with the bits of `step_scan`.

    Runs as many steps as the row with most tokens has; later columns of a row may hold anything.
    """
    tokens, decays, _ = _scanned(inputs, A)

    def step(t, h):
        token = jax.tree.map(lambda leaf: leaf[t], tokens)
        after = state_step(h, token, decays[t]).astype(h.dtype)
        return jnp.where((t < num_tokens)[:, None, None, None], after, h)

    most = jnp.minimum(jnp.max(num_tokens, initial=0), inputs.dt.shape[1])
    return loops.fori_loop(jnp.int32(0), most, step, h0)


def _advance(h: jax.Array, token: SSMInputs, decay: jax.Array, D: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state after one token, rounded to its storage dtype, and the output, which reads the unrounded one."""
    h_new = state_step(h, token, decay)
    y = contract(h_new, _per_head(token.C, h.shape[1])) + rounded(D[None, :, None] * token.x)
    return h_new.astype(h.dtype), y


def _scanned(inputs: SSMInputs, A: jax.Array) -> tuple[SSMInputs, jax.Array, jax.Array]:
    """What a loop over tokens reads: inputs and decays, time first, and each token's index."""
    tokens = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.astype(jnp.float32), 1, 0), inputs)
    decay = alike(jnp.exp, rounded(tokens.dt * A[None, None]))
    return tokens, decay, jnp.arange(tokens.dt.shape[0], dtype=jnp.int32)


def _per_head(grouped: jax.Array, heads: int) -> jax.Array:
    """`[B, G, N]` to `[B, H, N]`."""
    return jnp.repeat(grouped, heads // grouped.shape[1], axis=1)
