"""Mamba-2's recurrence token by token (Dao and Gu 2024), in float32.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h: [P, N] per head

In the shapes below B is the batch, T tokens, H heads, P head dim, N state, G groups; head h reads group h // (H/G).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_dtype, check_shape
from pallas_kernels.arithmetic import alike, contract, rounded
from pallas_kernels.recurrent.arguments import Layout, check_state
from pallas_kernels.selection import finite
from pallas_kernels.selective_state_update.dual import Window


class SSMInputs(NamedTuple):
    """What the recurrence reads: x `[B, T, H, P]`, dt `[B, T, H]`, B and C `[B, T, G, N]`; C None gives no outputs."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: Any = None

    @property
    def values(self) -> jax.Array:
        """What outputs have shape and dtype of."""
        return self.x


class Mamba2(NamedTuple):
    """The recurrence with one layer's weights: A and D `[H]` float32; D None gives no outputs."""

    A: jax.Array
    D: Any = None

    def prepared(self, inputs: SSMInputs) -> tuple[SSMInputs, jax.Array]:
        """Inputs and decays, time first."""
        tokens = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.astype(jnp.float32), 1, 0), inputs)
        return tokens, alike(jnp.exp, rounded(tokens.dt * self.A[None, None]))

    def state_step(self, h: jax.Array, token: tuple[SSMInputs, jax.Array]) -> jax.Array:
        """`h [B, H, P, N]` after one token."""
        (x, dt, B, _), decay = token
        B = _per_head(B, h.shape[1])
        x, B = (jnp.where((dt == 0)[..., None], finite(leaf), leaf) for leaf in (x, B))  # no token there
        injected = (dt[..., None] * x)[..., None] * B[:, :, None, :]
        return rounded(h.astype(jnp.float32) * decay[..., None, None]) + rounded(injected)

    def output(self, h: jax.Array, token: tuple[SSMInputs, jax.Array]) -> jax.Array:
        """`[B, H, P]`."""
        inputs, _ = token
        return contract(h, _per_head(inputs.C, h.shape[1])) + rounded(self.D[None, :, None] * inputs.x)

    def window(self, h0: jax.Array, inputs: SSMInputs, parents: jax.Array | None) -> Window:
        """The state-space dual form."""
        return Window.of(h0, inputs, self.A, self.D, parents)


def layout(op: str, state: jax.Array, rule: Mamba2) -> Layout:
    """What the pool `[L, S, H, P, N]` makes of the shapes of inputs; checks the pool and the weights."""
    check_state(op, state, ("L", "S", "H", "P", "N"))
    H, P, N = state.shape[2:]
    for name, weight in rule._asdict().items():
        if weight is not None:
            check_shape(op, name, weight, (H,))
            check_dtype(op, name, weight, jnp.float32)
    shapes: dict[str, tuple[int | str, ...]] = {"x": (H, P), "dt": (H,), "B": ("G", N), "C": ("G", N)}
    return Layout(shapes, float32=("dt",), kept=("x", "dt", "B"), groups="G")


def _per_head(grouped: jax.Array, heads: int) -> jax.Array:
    """`[B, G, N]` to `[B, H, N]`."""
    return jnp.repeat(grouped, heads // grouped.shape[1], axis=1)
