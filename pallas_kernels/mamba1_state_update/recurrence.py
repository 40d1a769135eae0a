"""Mamba-1's recurrence token by token (Gu and Dao 2023), in float32: a decay for every channel and state.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h, A: [C, N]; dt, x: [C]

In the shapes below B is the batch, T tokens, C channels, N state. There is no chunked form: a decay that differs
between states leaves no products of matrices.
"""

from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_dtype, check_shape
from pallas_kernels.arithmetic import alike, contract, rounded
from pallas_kernels.recurrent.arguments import Layout, check_state


class Mamba1Inputs(NamedTuple):
    """What the recurrence reads: x and dt `[B, T, C]`, B and C `[B, T, N]`; C None gives no outputs."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: Any = None

    @property
    def values(self) -> jax.Array:
        """What outputs have shape and dtype of."""
        return self.x


class Mamba1(NamedTuple):
    """The recurrence with one layer's weights: A `[C, N]` and D `[C]` float32; D None gives no outputs."""

    A: jax.Array
    D: Any = None

    def prepared(self, inputs: Mamba1Inputs) -> Mamba1Inputs:
        """Inputs, time first."""
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.astype(jnp.float32), 1, 0), inputs)

    def state_step(self, h: jax.Array, token: Mamba1Inputs) -> jax.Array:
        """`h [B, 1, C, N]` after one token."""
        decay = alike(jnp.exp, rounded(token.dt[..., None] * self.A[None]))
        injected = (token.dt * token.x)[..., None] * token.B[:, None]
        return rounded(h.astype(jnp.float32) * decay[:, None]) + rounded(injected)[:, None]

    def output(self, h: jax.Array, token: Mamba1Inputs) -> jax.Array:
        """`[B, C]`."""
        return contract(h[:, 0], token.C) + rounded(self.D[None] * token.x)

    def window(self, h0: jax.Array, inputs: Mamba1Inputs, parents: jax.Array | None) -> NoReturn:
        """There is none."""
        raise NotImplementedError("Mamba-1 has no chunked form")


def layout(op: str, state: jax.Array, rule: Mamba1) -> Layout:
    """What the pool `[L, S, 1, C, N]` makes of the shapes of inputs; checks the pool and the weights."""
    check_state(op, state, ("L", "S", 1, "C", "N"))
    C, N = state.shape[3:]
    for name, weight, shape in (("A", rule.A, (C, N)), ("D", rule.D, (C,))):
        if weight is not None:
            check_shape(op, name, weight, shape)
            check_dtype(op, name, weight, jnp.float32)
    shapes: dict[str, tuple[int | str, ...]] = {"x": (C,), "dt": (C,), "B": (N,), "C": (N,)}
    return Layout(shapes, float32=("dt",), kept=("x", "dt", "B"))
