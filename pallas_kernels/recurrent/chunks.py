"""A recurrence over a stretch of text, chunk by chunk, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.recurrent.rule import Rule


def chunk_scan(rule: Rule, h0: jax.Array, inputs: Any, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Every output `[B, T, ...]` and the state after the last token, both float32; the last chunk may be short.

    The inputs are padded with zeros, which must leave a state as it is.
    """
    T = inputs.values.shape[1]
    chunk = min(chunk_size, T)

    def chunks(leaf):
        padded = jnp.pad(leaf, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(leaf.shape[0], -1, chunk, *leaf.shape[2:]), 1, 0)

    def step(h, inputs):
        window = rule.window(h, inputs, None)
        return window.end(), window.outputs()

    h, y = loops.scan(step, h0.astype(jnp.float32), jax.tree.map(chunks, inputs))
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :T], h
