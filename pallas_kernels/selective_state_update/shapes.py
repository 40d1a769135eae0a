"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ring import Ring


@dataclass(frozen=True)
class SSMShape:
    """Mamba-2 layers of one model: L, H, P, N, G, and the dtypes of states and of inputs."""

    layers: int
    heads: int
    head_dim: int
    state: int
    groups: int
    state_dtype: Any = jnp.float32
    dtype: Any = jnp.bfloat16


NEMOTRON_3_SUPER = SSMShape(layers=40, heads=128, head_dim=64, state=128, groups=8)
GRANITE_4_H_SMALL = SSMShape(layers=36, heads=128, head_dim=64, state=128, groups=1)
FALCON_H1 = SSMShape(layers=72, heads=32, head_dim=128, state=256, groups=2)

SHAPES = {
    "nemotron-3-super": NEMOTRON_3_SUPER,
    "granite-4-h-small": GRANITE_4_H_SMALL,
    "falcon-h1": FALCON_H1,
}


def arguments(
    shape: SSMShape, slots: int, batch: int, steps: int, *, keep: str = "state", tree: bool = False, length: int = 0
) -> dict[str, Any]:
    """Abstract keyword arguments of `selective_state_update`, but for the layer.

    Args:
        shape: of the model.
        slots, batch, steps: S, B, T.
        keep: what the pass writes: "state", "snapshots", "ring" or "nothing".
        tree: with parents.
        length: Q, of a ring.
    """

    def array(dims, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(dims, dtype)

    L, H, P, N, G = shape.layers, shape.heads, shape.head_dim, shape.state, shape.groups
    window = (batch, steps)
    given: dict[str, Any] = {
        "state": array((L, slots, H, P, N), shape.state_dtype),
        "x": array((*window, H, P), shape.dtype),
        "dt": array((*window, H), jnp.float32),
        "A": array((H,), jnp.float32),
        "B": array((*window, G, N), shape.dtype),
        "C": array((*window, G, N), shape.dtype),
        "D": array((H,), jnp.float32),
        "slots": array((batch,)),
    }
    if tree:
        given["parents"] = array(window)
    if keep == "snapshots":
        given["snapshots"] = array((L, *window, H, P, N), shape.state_dtype)
    if keep == "ring":
        given["ring"] = ring(shape, slots, length)
        given["fold"] = array((batch,), jnp.bool_)
    return given


def ring(shape: SSMShape, slots: int, length: int) -> Ring:
    """An abstract ring of Q = `length` inputs a slot."""
    entries = (shape.layers, slots, length)
    inputs = {
        "x": jax.ShapeDtypeStruct((*entries, shape.heads, shape.head_dim), shape.dtype),
        "dt": jax.ShapeDtypeStruct((*entries, shape.heads), jnp.float32),
        "B": jax.ShapeDtypeStruct((*entries, shape.groups, shape.state), shape.dtype),
    }
    cursor: Any = jax.ShapeDtypeStruct((slots,), jnp.int32)
    order: Any = jax.ShapeDtypeStruct((slots, length), jnp.int32)
    return Ring(inputs, cursor, cursor, order)
