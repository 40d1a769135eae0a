"""The gated delta rule token by token (Yang, Kautz and Hatamizadeh 2024; per-channel decay: Kimi Linear, 2025).

    S' = S_{t-1} diag(exp(g_t)),   u_t = beta_t (v_t - S' k_t),   S_t = S' + u_t k_t^T,   o_t = S_t q_t        S: [V, K]

with k_t and q_t scaled to unit length, and q_t by `scale` besides. In the shapes below B is rows, T tokens, Hk key
heads, Hv value heads (a multiple of Hk; value head h reads key head h // (Hv/Hk)), K and V the sizes of a key and a
value. All arithmetic is float32; the state is rounded to its storage dtype after every token.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.arithmetic import alike, contract, fenced, rounded

EPS = 1e-6  # under the root of a key's squared length


class Tokens(NamedTuple):
    """What the recurrence reads of a window: all that is needed to run it again, and the queries.

    Attributes:
        k: `[B, T, Hk, K]` keys as they come out of the convolution.
        v: `[B, T, Hv, V]`.
        g: `[B, T, Hv]`, or `[B, T, Hv, K]` for a decay per key channel; float32 logarithm of the decay.
        beta: `[B, T, Hv]` float32.
        q: `[B, T, Hk, K]`, or None where no outputs are wanted.
    """

    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    q: Any = None


def gates(a: jax.Array, b: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`g = -exp(A_log) softplus(a + dt_bias)` and `beta = sigmoid(b)`, float32 from the first operation on.

    Args:
        a: `[B, T, Hv]`, or `[B, T, Hv, K]` for a decay per key channel, as projected.
        b: `[B, T, Hv]` as projected.
        A_log: `[Hv]`.
        dt_bias: `[Hv]`, or `[Hv, K]` with a decay per key channel.
    """
    a, b, A_log, dt_bias = (leaf.astype(jnp.float32) for leaf in (a, b, A_log, dt_bias))
    rate = alike(jnp.exp, A_log)
    steps = alike(jax.nn.softplus, a + dt_bias[None, None])
    return -(rate[None, None, :, None] if a.ndim == 4 else rate[None, None]) * steps, alike(jax.nn.sigmoid, b)


def unit_tokens(tokens: Tokens, scale: float) -> Tokens:
    """The tokens in float32 with keys and queries of unit length, queries scaled, and g as `[B, T, Hv, 1 or K]`."""
    tokens = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tokens)
    q = None if tokens.q is None else fenced(_unit(tokens.q) * scale)
    g = tokens.g if tokens.g.ndim == 4 else tokens.g[..., None]
    return tokens._replace(k=fenced(_unit(tokens.k)), g=g, q=q)


def prepared(tokens: Tokens, scale: float) -> Tokens:
    """`unit_tokens` with the decay itself in the place of its logarithm, and time first: what `advance` reads."""
    tokens = unit_tokens(tokens, scale)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens._replace(g=alike(jnp.exp, tokens.g)))


def state_step(state: jax.Array, token: Tokens) -> jax.Array:
    """One prepared token (no T axis): `state [B, Hv, V, K]` in its storage dtype; the state after it in float32."""
    k = per_head(token.k, state.shape[1])
    decayed = rounded(state.astype(jnp.float32) * token.g[:, :, None, :])
    update = token.beta[..., None] * (token.v - contract(decayed, k))
    return decayed + rounded(update[..., None] * k[:, :, None, :])


def advance(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """One prepared token: the state after it, rounded to its storage dtype, and the output `[B, Hv, V]` in float32.

    The output reads the unrounded state.
    """
    new = state_step(state, token)
    return new.astype(state.dtype), contract(new, per_head(token.q, state.shape[1]))


def step_scan(
    state: jax.Array, tokens: Tokens, num_tokens: jax.Array, scale: float, snapshots: jax.Array | None, index: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The recurrence over each row's first `num_tokens[b]` tokens: outputs, the state after them, and snapshots.

    It is a scan even for one token: the compiled body is then the same for every T, and so are the bits.

    Args:
        state: `[B, Hv, V, K]`.
        tokens: the window's.
        num_tokens: `[B]` int32; later tokens leave the state as it is, and their output is 0.
        scale: of the queries.
        snapshots: `[L, B, T, Hv, V, K]` of all layers, or None to keep none.
        index: the layer of `snapshots` that receives the state after every token.
    """

    def step(carry, per_token):
        state, snapshots = carry
        token, t = per_token
        new, output = advance(state, token)
        state = jnp.where(_rows(t < num_tokens, new), new, state)
        if snapshots is not None:
            snapshots = snapshots.at[index, :, t].set(state)
        return (state, snapshots), jnp.where(_rows(t < num_tokens, output), output, 0)

    (state, snapshots), outputs = loops.scan(step, (state, snapshots), _numbered(prepared(tokens, scale)))
    return jnp.moveaxis(outputs, 0, 1), state, snapshots


def step_tree(
    state: jax.Array,
    tokens: Tokens,
    num_tokens: jax.Array,
    scale: float,
    parents: jax.Array,
    snapshots: jax.Array | None,
    index: int,
) -> tuple[jax.Array, jax.Array | None]:
    """The recurrence node by node, each from its parent's state: outputs and snapshots, with `step_scan`'s bits.

    A node reads its parent's state where it was stored, rounded. Without `snapshots` the states of this layer are kept
    for as long as the layer runs. Arguments as `step_scan`'s; parents is `[B, T]` int32, -1 or an earlier node.
    """
    B, T = parents.shape
    rows = jnp.arange(B, dtype=jnp.int32)
    layer = 0 if snapshots is None else index
    states = jnp.zeros((1, B, T, *state.shape[1:]), state.dtype) if snapshots is None else snapshots

    def step(states, per_node):
        (token, t), parent = per_node
        before = jnp.where(_rows(parent < 0, state), state, states[layer, rows, jnp.maximum(parent, 0)])
        new, output = advance(before, token)
        return states.at[layer, :, t].set(new), jnp.where(_rows(t < num_tokens, output), output, 0)

    states, outputs = loops.scan(step, states, (_numbered(prepared(tokens, scale)), parents.T))
    return jnp.moveaxis(outputs, 0, 1), None if snapshots is None else states


def fold(state: jax.Array, tokens: Tokens, num_tokens: jax.Array) -> jax.Array:
    """The state `[B, Hv, V, K]` after each row's first `num_tokens[b]` tokens, with the bits of `step_scan`.

    It takes as many steps as the longest row has tokens. Queries are not read.
    """
    leaves = prepared(tokens._replace(q=None), 1.0)

    def step(t, state):
        token = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, t, keepdims=False), leaves)
        new = state_step(state, token).astype(state.dtype)
        return jnp.where(_rows(t < num_tokens, new), new, state)

    longest = jnp.clip(jnp.max(num_tokens), 0, tokens.k.shape[1])
    return loops.fori_loop(jnp.int32(0), longest, step, state)


def per_head(leaf: jax.Array, heads: int, axis: int = 1) -> jax.Array:
    """Key heads repeated for the value heads that read them."""
    return jnp.repeat(leaf, heads // leaf.shape[axis], axis=axis)


def _unit(x: jax.Array) -> jax.Array:
    return x * alike(jax.lax.rsqrt, contract(x[..., None, :], x) + EPS)


def _numbered(leaves: Tokens) -> tuple[Tokens, jax.Array]:
    return leaves, jnp.arange(leaves.k.shape[0], dtype=jnp.int32)


def _rows(flags: jax.Array, like: jax.Array) -> jax.Array:
    return flags.reshape(-1, *[1] * (like.ndim - 1))
