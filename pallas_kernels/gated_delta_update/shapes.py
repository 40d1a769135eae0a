"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ring import Ring


@dataclass(frozen=True)
class DeltaShape:
    """Gated delta layers of one model: L, Hk, Hv, V, K, whether each key channel decays by itself, and dtypes."""

    layers: int
    key_heads: int
    heads: int
    value_dim: int
    key_dim: int
    per_channel: bool = False
    state_dtype: Any = jnp.float32
    dtype: Any = jnp.bfloat16


QWEN3_NEXT = DeltaShape(layers=36, key_heads=16, heads=32, value_dim=128, key_dim=128)
QWEN3_5_35B = DeltaShape(layers=30, key_heads=16, heads=32, value_dim=128, key_dim=128)
KIMI_LINEAR_48B = DeltaShape(layers=20, key_heads=32, heads=32, value_dim=128, key_dim=128, per_channel=True)

SHAPES = {"qwen3-next": QWEN3_NEXT, "qwen3.5-35b": QWEN3_5_35B, "kimi-linear-48b": KIMI_LINEAR_48B}


def arguments(
    shape: DeltaShape, slots: int, batch: int, steps: int, *, keep: str = "state", tree: bool = False, length: int = 0
) -> dict[str, Any]:
    """Abstract keyword arguments of `gated_delta_update`, but for the layer.

    Args:
        shape: of the model.
        slots, batch, steps: S, B, T.
        keep: what the pass writes: "state", "snapshots", "ring" or "nothing".
        tree: with parents.
        length: Q, of a ring.
    """
    L, state = shape.layers, (shape.heads, shape.value_dim, shape.key_dim)
    inputs = _inputs(shape, batch, steps)
    given: dict[str, Any] = {
        "state": jax.ShapeDtypeStruct((L, slots, *state), shape.state_dtype),
        "q": inputs["k"],
        **inputs,
        "slots": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "num_tokens": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    if tree:
        given["parents"] = jax.ShapeDtypeStruct((batch, steps), jnp.int32)
    if keep == "snapshots":
        given["snapshots"] = jax.ShapeDtypeStruct((L, batch, steps, *state), shape.state_dtype)
    if keep == "ring":
        given["ring"] = ring(shape, slots, length)
        given["fold"] = jax.ShapeDtypeStruct((batch,), jnp.bool_)
    return given


def ring(shape: DeltaShape, slots: int, length: int) -> Ring:
    """An abstract ring of Q = `length` inputs a slot."""
    cursor: Any = jax.ShapeDtypeStruct((slots,), jnp.int32)
    order: Any = jax.ShapeDtypeStruct((slots, length), jnp.int32)
    return Ring(_inputs(shape, shape.layers, slots, length), cursor, cursor, order)


def _inputs(shape: DeltaShape, *entries: int) -> dict[str, Any]:
    def array(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((*entries, *dims), dtype)

    return {
        "k": array(shape.key_heads, shape.key_dim, dtype=shape.dtype),
        "v": array(shape.heads, shape.value_dim, dtype=shape.dtype),
        "g": array(shape.heads, shape.key_dim) if shape.per_channel else array(shape.heads),
        "beta": array(shape.heads),
    }
