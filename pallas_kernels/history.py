"""Where a program of a Triton kernel finds the inputs of a row in the ring, those of its history and its pass's own."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import triton


class History(NamedTuple):
    """A row's history in its ring.

    Attributes:
        order: ref of `[S, Q]`, the ring's.
        slot: of the row.
        start: where its history begins.
        size: how many tokens it has.
    """

    order: Any
    slot: jax.Array
    start: jax.Array
    size: jax.Array

    @property
    def length(self) -> int:
        """Q."""
        return self.order.shape[1]

    def entry(self, i: jax.Array) -> jax.Array:
        """The ring's entries of the inputs i after the checkpoint; from `size` on, those of the pass."""
        return triton.load(self.order.at[self.slot, lax.rem(self.start + i, jnp.int32(self.length))])
