"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class CommitShape:
    """Recurrent layers of one model: L, the state `x` of a layer, C and W of its convolution, and their dtypes."""

    layers: int
    state: tuple[int, ...]
    channels: int
    conv_width: int
    ssm_dtype: Any = jnp.float32
    conv_dtype: Any = jnp.bfloat16


NEMOTRON_3_SUPER = CommitShape(layers=40, state=(128, 64, 128), channels=10240, conv_width=4)
QWEN3_NEXT = CommitShape(layers=36, state=(32, 128, 128), channels=8192, conv_width=4)

SHAPES = {"nemotron-3-super": NEMOTRON_3_SUPER, "qwen3-next": QWEN3_NEXT}


def arguments(
    shape: CommitShape, slots: int, batch: int, steps: int, *, tree: bool = False, tracked: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract keyword arguments of `state_commit`, one source row an entry."""

    def array(dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    rows = (shape.layers, batch, steps)
    given = {
        "ssm": array((shape.layers, slots, *shape.state), shape.ssm_dtype),
        "conv": array((shape.layers, slots, shape.conv_width - 1, shape.channels), shape.conv_dtype),
        "ssm_states": array((*rows, *shape.state), shape.ssm_dtype),
        "conv_inputs": array((*rows, shape.channels), shape.conv_dtype),
        "slots": array((batch,)),
        "steps": array((batch,)),
    }
    if tree:
        given["parents"] = array((batch, steps))
    if tracked:
        given |= {"track_slots": array((batch,)), "track_steps": array((batch,))}
    return given
