"""What every implementation is told about the rows of a pass."""

from typing import NamedTuple

import jax


class Window(NamedTuple):
    """The rows.

    Attributes:
        slots: `[B]` int32, out of range for padding.
        lengths: `[B]` int32, committed positions.
        ends: `[B]` int32, where the real tokens of the window end in the buffers; 0 for padding.
        ancestors: `[B, T, offset + T]` bool of a tree, None for a chain.
        since: `[B, T]` int32, the first position that each token may look at; None for 0.
    """

    slots: jax.Array
    lengths: jax.Array
    ends: jax.Array
    ancestors: jax.Array | None
    since: jax.Array | None = None
