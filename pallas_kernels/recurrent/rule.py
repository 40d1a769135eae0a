"""What the engine asks of a recurrence in plain JAX. Letters: B rows, T tokens, H heads, P and N sides of a state."""

from typing import Any, Protocol

import jax


class Window(Protocol):
    """A window computed at once: the chunked form."""

    def outputs(self) -> jax.Array:
        """`[B, T, ...]` float32, the output of every token."""

    def states(self) -> jax.Array:
        """`[B, T, H, P, N]`, the state after every token."""

    def end(self) -> jax.Array:
        """`[B, H, P, N]`, the state after the last token of a chain."""


class Rule(Protocol):
    """A recurrence with one layer's weights.

    Its inputs are a NamedTuple of arrays `[B, T, ...]` in which everything that only outputs need is last and None by
    default, and whose property `values` is the array that outputs have shape and dtype of.
    """

    def prepared(self, inputs: Any) -> Any:
        """What the steps read: a pytree of `[T, B, ...]`."""

    def state_step(self, h: jax.Array, token: Any) -> jax.Array:
        """The state `[B, H, P, N]` after one prepared token (no T axis) in float32; h is in its storage dtype."""

    def output(self, h: jax.Array, token: Any) -> jax.Array:
        """The token's output `[B, ...]` in float32, from the state after it, unrounded."""

    def window(self, h0: jax.Array, inputs: Any, parents: jax.Array | None) -> Window:
        """The chunked form of a window: parents is `[B, T]`, -1 or an earlier node; None for a chain."""
