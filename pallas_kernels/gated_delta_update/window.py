"""The gated delta rule over a whole window at once, along a chain or along every path of a tree.

With G_t the sum of g from the root to t, and sums over ancestors j of t (t itself included only where said so):

    (I + L) U = diag(beta) (V - S_0 (exp(G_t) k_t)),     L_tj = beta_t k_t^T diag(exp(G_t - G_j)) k_j
    o_t = S_0 (exp(G_t) q_t) + sum_{j <= t} u_j (k_j^T diag(exp(G_t - G_j)) q_t)
    S_t = S_0 diag(exp(G_t)) + sum_{j <= t} u_j (exp(G_t - G_j) k_j)^T

(the WY form of Yang et al. 2024 under an ancestor mask). L is strictly lower triangular, as parents come before
children. Letters and tokens are `recurrence.py`'s; everything here is float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.sums import EXACT, Sums, decay_between, decay_to_end, path_sums, visible_nodes
from pallas_kernels.selection import is_finite, sees_any


class Window(NamedTuple):
    """A solved window.

    Attributes:
        state: `[B, Hv, V, K]` before it, in float32.
        dtype: what the state was stored in.
        k, q: `[B, T, Hk, K]` of unit length.
        updates: `[B, Hv, T, V]`, the u_t, 0 where spoilt.
        spoilt: `[B, Hv, T]` bool, tokens that see one with numbers that are not finite.
        sums: `[B, T, Hv, 1 or K]`, the G_t.
        visible: `[B or 1, T, T]` bool, where j is t or its ancestor.
    """

    state: jax.Array
    dtype: Any
    k: jax.Array
    q: jax.Array
    updates: jax.Array
    spoilt: jax.Array
    sums: Sums
    visible: jax.Array

    @classmethod
    def solved(cls, start: jax.Array, tokens: Any, parents: jax.Array | None) -> "Window":
        """A window of unit tokens; parents is `[B, T]` int32, -1 or an earlier node, or None for a chain."""
        T, heads, state = tokens.k.shape[1], start.shape[1], start.astype(jnp.float32)
        sums, visible = path_sums(tokens.g, parents), visible_nodes(T, parents)
        beta = jnp.moveaxis(tokens.beta, 1, 2)[..., None]  # [B, Hv, T, 1]
        carried = _from_state(state, tokens.k, sums)
        before = visible & ~jnp.eye(T, dtype=bool)
        lower = beta * _scores(tokens.k, tokens.k, sums, before, heads)
        right = beta * (jnp.moveaxis(tokens.v, 1, 2) - carried)
        # A solver multiplies: it is given zeros for a token that is not finite, and solves those that do not see it.
        whole = jnp.all(is_finite(lower), axis=-1) & jnp.all(is_finite(right), axis=-1)
        lower, right = (jnp.where(whole[..., None], part, 0) for part in (lower, right))
        updates = jax.lax.linalg.triangular_solve(lower, right, left_side=True, lower=True, unit_diagonal=True)
        spoilt = sees_any(visible[:, None], ~(whole & jnp.all(is_finite(updates), axis=-1)))
        updates = jnp.where(spoilt[..., None], 0, updates)
        return cls(state, start.dtype, tokens.k, tokens.q, updates, spoilt, sums, visible)

    def outputs(self) -> jax.Array:
        """`[B, T, Hv, V]`, the output of every token."""
        scores = _scores(self.q, self.k, self.sums, self.visible, self.state.shape[1])
        within = jnp.einsum("bhtj,bhjv->bhtv", scores, self.updates, precision=EXACT)
        o = _from_state(self.state, self.q, self.sums) + within
        return jnp.moveaxis(jnp.where(self.spoilt[..., None], jnp.nan, o), 2, 1)

    def states(self) -> jax.Array:
        """`[B, T, Hv, V, K]`, the state after every token."""
        k = per_head(self.k, self.state.shape[1], axis=2)
        keys = decay_between(self.sums, self.visible) * k[:, None]  # [B, T, T, Hv, K]
        keys = jnp.where(self.visible[..., None, None], keys, 0)
        added = jnp.einsum("bhjv,btjhk->bthvk", self.updates, keys, precision=EXACT)
        after = jnp.exp(self.sums[0])[:, :, :, None] * self.state[:, None] + added
        return jnp.where(jnp.moveaxis(self.spoilt, 1, 2)[..., None, None], jnp.nan, after)

    def end(self) -> jax.Array:
        """`[B, Hv, V, K]`, the state after the last token of a chain, in the dtype it was stored in."""
        k = per_head(self.k, self.state.shape[1], axis=2) * decay_to_end(self.sums)
        added = jnp.einsum("bhjv,bjhk->bhvk", self.updates, k, precision=EXACT)
        after = jnp.exp(self.sums[0][:, -1])[:, :, None] * self.state + added
        return jnp.where(self.spoilt[:, :, -1, None, None], jnp.nan, after).astype(self.dtype)


def per_head(leaf: jax.Array, heads: int, axis: int = 1) -> jax.Array:
    """Key heads repeated for the value heads that read them."""
    return jnp.repeat(leaf, heads // leaf.shape[axis], axis=axis)


def _from_state(state: jax.Array, x: jax.Array, sums: Sums) -> jax.Array:
    """`S_0 (exp(G_t) x_t)`, `[B, Hv, T, V]`."""
    decayed = per_head(x, state.shape[1], axis=2) * jnp.exp(sums[0])
    return jnp.einsum("bhvk,bthk->bhtv", state, decayed, precision=EXACT)


def _scores(x: jax.Array, k: jax.Array, sums: Sums, visible: jax.Array, heads: int) -> jax.Array:
    """`x_t^T diag(exp(G_t - G_j)) k_j` where t sees j and 0 elsewhere, `[B, Hv, T, T]`."""
    between = decay_between(sums, visible)
    if between.shape[-1] == 1:  # one decay a head: a plain product of the key heads will do
        products = jnp.einsum("bthk,bjhk->bhtj", x, k, precision=EXACT)
        scores = per_head(products, heads) * jnp.moveaxis(between[..., 0], 3, 1)
    else:
        x, k = per_head(x, heads, axis=2), per_head(k, heads, axis=2)
        scores = jnp.moveaxis(jnp.sum(x[:, :, None] * k[:, None] * between, axis=-1), 3, 1)
    return jnp.where(visible[:, None], scores, 0)
