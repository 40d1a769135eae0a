"""Mamba's depthwise causal convolution over a slot's window and the inputs that follow it.

The kernel is a handful of taps, so the convolution is their shifted products: two orders of magnitude faster on a CPU
than a general convolution, and every output is the same sum wherever its token stands.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Parents, Rows
from mamba_spec_jax.attention.arithmetic import rounded
from pallas_kernels.state_commit.window import taps


def causal_conv1d(
    window: Float[Array, "B W-1 C"],
    inputs: Float[Array, "B T C"],
    weight: Float[Array, "W C"],
    bias: Float[Array, "C"] | None,
    parents: Parents | None = None,
) -> Float[Array, "B T C"]:
    """silu of the convolution, in float32; `weight[W-1]` is the tap of the token itself.

    A token's neighbours are the columns before it or, in a tree, its ancestors; then the old window.
    """
    T, width = inputs.shape[1], weight.shape[0]
    history = jnp.concatenate([window, inputs], axis=1).astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    neighbours: Iterator[Array]
    if parents is None:
        neighbours = (history[:, tap : tap + T] for tap in range(width))
    else:
        neighbours = _along_paths(history, parents, width)
    total = sum(rounded(neighbour * weight[tap]) for tap, neighbour in enumerate(neighbours))
    if bias is not None:
        total = total + bias.astype(jnp.float32)
    return jax.nn.silu(total)


def advance_window(
    window: Float[Array, "B W-1 C"], inputs: Float[Array, "B T C"], num_tokens: Rows
) -> Float[Array, "B W-1 C"]:
    """The last W-1 inputs after each row's first `num_tokens[b]` ones."""
    history = jnp.concatenate([window, inputs.astype(window.dtype)], axis=1)
    index = num_tokens[:, None] + jnp.arange(window.shape[1])
    return jnp.take_along_axis(history, index[:, :, None], axis=1)


def _along_paths(history: Float[Array, "B W-1+T C"], parents: Parents, width: int) -> Iterator[Array]:
    """The last `width` inputs up to every node of a tree, itself included: `[B, T, C]` a tap, the oldest first."""
    nodes = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32), parents.shape)

    def parent_of(node):
        return jnp.take_along_axis(parents, node, axis=1)

    # Taps count from a window of `width` columns, whose first the node itself has pushed out.
    return (jnp.take_along_axis(history, (tap - 1)[..., None], axis=1) for tap in taps(nodes, parent_of, width))
