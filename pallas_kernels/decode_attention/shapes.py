"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionShape:
    """Full attention of one model: how many layers have it, Hq, Hkv, Dh, and the dtype of everything."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16


SHAPES = {
    "nemotron-3-super": AttentionShape(layers=8, heads=32, kv_heads=2, head_dim=128),
    "nemotron-3-nano": AttentionShape(layers=6, heads=32, kv_heads=2, head_dim=128),
    "qwen3-next": AttentionShape(layers=12, heads=16, kv_heads=2, head_dim=256),
    "qwen3.5-35b": AttentionShape(layers=10, heads=16, kv_heads=2, head_dim=256),
    "granite-4-h-small": AttentionShape(layers=4, heads=32, kv_heads=8, head_dim=128),
    "falcon-h1-34b": AttentionShape(layers=72, heads=20, kv_heads=4, head_dim=128),
}


def arguments(
    shape: AttentionShape, slots: int, max_len: int, batch: int, steps: int, *, tree: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract array arguments of `decode_attention`."""
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    buffer = jax.ShapeDtypeStruct((slots, max_len, shape.kv_heads, shape.head_dim), shape.dtype)
    given = {
        "query": jax.ShapeDtypeStruct((batch, steps, shape.heads, shape.head_dim), shape.dtype),
        "keys": buffer,
        "values": buffer,
        "slots": rows,
        "lengths": rows,
        "num_tokens": rows,
    }
    if tree:
        given["ancestors"] = jax.ShapeDtypeStruct((batch, steps, steps), jnp.bool_)
    return given
