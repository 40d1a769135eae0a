"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ConvShape:
    """Convolutions of one model: L, C, W, and the dtype of windows and inputs."""

    layers: int
    channels: int
    width: int = 4
    dtype: Any = jnp.bfloat16


SHAPES = {
    "nemotron-3-super": ConvShape(layers=40, channels=10240),
    "granite-4-h-small": ConvShape(layers=36, channels=8448),
    "falcon-h1": ConvShape(layers=72, channels=5120),
    "qwen3-next": ConvShape(layers=36, channels=8192),
}


def arguments(
    shape: ConvShape, slots: int, batch: int, steps: int, *, record: bool = False, tree: bool = False
) -> dict[str, Any]:
    """Abstract keyword arguments of `causal_conv1d_update`, but for the layer; record: with conv_inputs."""

    def array(dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    given = {
        "x": array((batch, steps, shape.channels), shape.dtype),
        "conv_state": array((shape.layers, slots, shape.width - 1, shape.channels), shape.dtype),
        "weight": array((shape.width, shape.channels), shape.dtype),
        "bias": array((shape.channels,), shape.dtype),
        "slots": array((batch,)),
    }
    if record:
        given["conv_inputs"] = array((shape.layers, batch, steps, shape.channels), shape.dtype)
    if tree:
        given["parents"] = array((batch, steps))
    return given
