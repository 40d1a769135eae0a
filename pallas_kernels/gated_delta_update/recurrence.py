"""The gated delta rule token by token (Yang, Kautz and Hatamizadeh 2024; per-channel decay: Kimi Linear, 2025).

    S' = S_{t-1} diag(exp(g_t)),   u_t = beta_t (v_t - S' k_t),   S_t = S' + u_t k_t^T,   o_t = S_t q_t        S: [V, K]

with k_t and q_t scaled to unit length, and q_t by `scale` besides. In the shapes below B is rows, T tokens, Hk key
heads, Hv value heads (a multiple of Hk; value head h reads key head h // (Hv/Hk)), K and V the sizes of a key and a
value. All arithmetic is float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import alike, contract, fenced, rounded
from pallas_kernels.gated_delta_update.window import Window, per_head
from pallas_kernels.recurrent.arguments import Layout, check_state

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

    @property
    def values(self) -> jax.Array:
        """What outputs have shape and dtype of."""
        return self.v


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


class GatedDelta(NamedTuple):
    """The recurrence; scale is of the queries."""

    scale: float

    def prepared(self, tokens: Tokens) -> Tokens:
        """Tokens of unit length with the decay itself in the place of its logarithm, time first."""
        tokens = self._unit_tokens(tokens)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens._replace(g=alike(jnp.exp, tokens.g)))

    def state_step(self, state: jax.Array, token: Tokens) -> jax.Array:
        """`state [B, Hv, V, K]` after one token."""
        k = per_head(token.k, state.shape[1])
        decayed = rounded(state.astype(jnp.float32) * token.g[:, :, None, :])
        update = token.beta[..., None] * (token.v - contract(decayed, k))
        return decayed + rounded(update[..., None] * k[:, :, None, :])

    def output(self, state: jax.Array, token: Tokens) -> jax.Array:
        """`[B, Hv, V]`."""
        return contract(state, per_head(token.q, state.shape[1]))

    def window(self, state: jax.Array, tokens: Tokens, parents: jax.Array | None) -> Window:
        """The WY form."""
        return Window.solved(state, self._unit_tokens(tokens), parents)

    def _unit_tokens(self, tokens: Tokens) -> Tokens:
        """In float32 with keys and queries of unit length, queries scaled, and g as `[B, T, Hv, 1 or K]`."""
        tokens = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tokens)
        q = None if tokens.q is None else fenced(_unit(tokens.q) * self.scale)
        g = tokens.g if tokens.g.ndim == 4 else tokens.g[..., None]
        return tokens._replace(k=fenced(_unit(tokens.k)), g=g, q=q)


def layout(op: str, state: jax.Array, *, per_channel: bool) -> Layout:
    """What the pool `[L, S, Hv, V, K]` makes of the shapes of inputs; checks the pool."""
    check_state(op, state, ("L", "S", "Hv", "V", "K"))
    Hv, V, K = state.shape[2:]
    shapes: dict[str, tuple[int | str, ...]] = {
        "k": ("Hk", K),
        "q": ("Hk", K),
        "v": (Hv, V),
        "g": (Hv, K) if per_channel else (Hv,),
        "beta": (Hv,),
    }
    return Layout(shapes, float32=("g", "beta"), kept=("k", "v", "g", "beta"), groups="Hk")


def _unit(x: jax.Array) -> jax.Array:
    return x * alike(jax.lax.rsqrt, contract(x[..., None, :], x) + EPS)
