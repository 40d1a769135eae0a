"""The op in plain JAX, `implementation="xla"`.

The kernel is a handful of taps, so the convolution is their shifted products: two orders of magnitude faster on a CPU
than a general convolution, and an output is the same sum at every index.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.arithmetic import alike, fenced, rounded
from pallas_kernels.entries import inside
from pallas_kernels.state_commit.window import taps


def update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array | None,
    conv_inputs: jax.Array | None,
    parents: jax.Array | None,
    activation: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Outputs, and either the pool with the windows advanced or the record with the inputs."""
    # What is out of range is moved past the end, where JAX drops writes (-1 would wrap around).
    index = jnp.where(inside(slots, conv_state.shape[1]), slots, conv_state.shape[1])
    window = conv_state.at[layer, index].get(mode="fill", fill_value=0)
    inputs = x.astype(conv_state.dtype)
    y = fenced(_convolve(window, inputs, weight, bias, parents))
    if activation is not None:
        y = rounded(alike(jax.nn.silu, y))  # silu ends in a product, and whoever reads it may begin with a sum
    y = y.astype(x.dtype)
    if conv_inputs is not None:
        return y, conv_state, conv_inputs.at[layer].set(inputs)
    if num_tokens is None:
        num_tokens = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    window = _advance_window(window, inputs, num_tokens)
    return y, conv_state.at[layer, index].set(window, mode="drop"), None


def _convolve(
    window: jax.Array, inputs: jax.Array, weight: jax.Array, bias: jax.Array | None, parents: jax.Array | None
) -> jax.Array:
    """The convolution `[B, T, C]` in float32, of `window [B, W-1, C]` and `inputs [B, T, C]`."""
    T, width = inputs.shape[1], weight.shape[0]
    history = jnp.concatenate([window, inputs], axis=1).astype(jnp.float32)
    weight = weight.astype(jnp.float32)
    neighbours: Iterator[jax.Array]
    if parents is None:
        neighbours = (history[:, tap : tap + T] for tap in range(width))
    else:
        neighbours = _along_paths(history, parents, width)
    total = jnp.asarray(sum(rounded(neighbour * weight[None, None, tap]) for tap, neighbour in enumerate(neighbours)))
    if bias is not None:
        total = total + bias.astype(jnp.float32)[None, None]
    return total


def _along_paths(history: jax.Array, parents: jax.Array, width: int) -> Iterator[jax.Array]:
    """The last `width` inputs up to every node of a tree, itself included: `[B, T, C]` a tap, the oldest first."""
    nodes = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32), parents.shape)

    def parent_of(node):
        return jnp.take_along_axis(parents, node, axis=1)

    # Taps count from a window of `width` columns, whose first the node itself has pushed out.
    return (jnp.take_along_axis(history, (tap - 1)[..., None], axis=1) for tap in taps(nodes, parent_of, width))


def _advance_window(window: jax.Array, inputs: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """The last W-1 inputs after each row's first `num_tokens[b]` ones."""
    history = jnp.concatenate([window, inputs], axis=1)
    index = num_tokens[:, None] + jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(history, index[:, :, None], axis=1)
