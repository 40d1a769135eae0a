"""Mamba-2's recurrence over a whole window at once (the state-space dual form of Dao and Gu 2024), in float32.

    y_t = exp(c_t) h_0 C_t + sum_j exp(c_t - c_j) dt_j (C_t . B_j) x_j + D x_t
    h_t = exp(c_t) h_0     + sum_j exp(c_t - c_j) dt_j x_j B_j^T

where c is dt A summed along the path that leads to a token, and j is the token itself or any before it; on a tree, any
ancestor. Letters as in `recurrence.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import rounded
from pallas_kernels.recurrent.sums import EXACT, Sums, decay_between, decay_to_end, path_sums, visible_nodes
from pallas_kernels.selection import finite, is_finite, sees_any


class Window(NamedTuple):
    """A window, all in float32.

    Attributes:
        h0: `[B, H, P, N]` before it.
        x, dt, B, C: its inputs.
        A, D: `[H]`.
        sums: `[B, T, H]`, dt A summed along each token's path.
        visible: `[B or 1, T, T]`, the tokens (axis 2) that each token sees.
    """

    h0: jax.Array
    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: Any
    A: jax.Array
    D: Any
    sums: Sums
    visible: jax.Array

    @classmethod
    def of(cls, h0: jax.Array, inputs: Any, A: jax.Array, D: Any, parents: jax.Array | None) -> "Window":
        """The window of some `SSMInputs`; parents `[B, T]`, -1 or an earlier node, None for a chain."""
        x, dt, B, C = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
        sums = path_sums(rounded(dt * A[None, None]), parents)
        return cls(h0.astype(jnp.float32), x, dt, B, C, A, D, sums, visible_nodes(dt.shape[1], parents))

    def outputs(self) -> jax.Array:
        """`[B, T, H, P]`."""
        H = self.h0.shape[1]
        scores = jnp.einsum("btgn,bjgn->btjg", self.C, self.B, precision=EXACT)
        weights = self._weights(jnp.repeat(scores, H // scores.shape[-1], axis=-1))
        y = jnp.einsum("btjh,bjhp->bthp", weights, finite(self.x), precision=EXACT)
        carried = jnp.einsum("bhpn,bthn->bthp", self.h0, self._per_head(self.C), precision=EXACT)
        y = y + jnp.exp(self.sums[0])[..., None] * carried + self.D[None, None, :, None] * self.x
        return jnp.where(sees_any(self.visible, self._spoilt)[..., None, None], jnp.nan, y)

    def states(self) -> jax.Array:
        """`[B, T, H, P, N]`."""
        B = finite(self._per_head(self.B))
        states = jnp.einsum("btjh,bjhp,bjhn->bthpn", self._weights(), finite(self.x), B, precision=EXACT)
        states = states + jnp.exp(self.sums[0])[..., None, None] * self.h0[:, None]
        return jnp.where(sees_any(self.visible, self._spoilt)[..., None, None, None], jnp.nan, states)

    def end(self) -> jax.Array:
        """`[B, H, P, N]` after a chain; cheaper than the last of its `states`."""
        weighted = (decay_to_end(self.sums) * self.dt)[..., None] * finite(self.x)
        whole = jnp.exp(jnp.sum(self.dt * self.A[None, None], axis=1))
        gained = jnp.einsum("bjhp,bjhn->bhpn", weighted, finite(self._per_head(self.B)), precision=EXACT)
        spoilt = jnp.any(self._spoilt, axis=1)[:, None, None, None]
        return jnp.where(spoilt, jnp.nan, self.h0 * whole[..., None, None] + gained)

    @property
    def _spoilt(self) -> jax.Array:
        """`[B, T]`, tokens whose x or B is not finite; not those with dt = 0, which leave every state as it is."""
        whole = jnp.all(is_finite(self.x), axis=(2, 3)) & jnp.all(is_finite(self.B), axis=(2, 3))
        return ~whole & jnp.any(self.dt != 0, axis=2)

    def _weights(self, scores: jax.Array | None = None) -> jax.Array:
        """`scores exp(c_t - c_j) dt_j` where t sees j and 0 elsewhere, `[B, T, T, H]`; scores None is 1."""
        decay = decay_between(self.sums, self.visible)
        weights = (decay if scores is None else scores * decay) * self.dt[:, None]
        return jnp.where(self.visible[..., None], weights, 0)

    def _per_head(self, grouped: jax.Array) -> jax.Array:
        """`[B, T, G, N]` to `[B, T, H, N]`."""
        return jnp.repeat(grouped, self.h0.shape[1] // grouped.shape[2], axis=2)
