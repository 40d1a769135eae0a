"""The op in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.arithmetic import rounded
from pallas_kernels.selective_state_update import dual
from pallas_kernels.selective_state_update.recurrence import SSMInputs


def chunk_scan(
    h0: jax.Array, inputs: SSMInputs, A: jax.Array, D: jax.Array, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
    """Every output `[B, T, H, P]` and the final state `[B, H, P, N]`, in float32; the last chunk may be short."""
    T = inputs.x.shape[1]
    chunk = min(chunk_size, T)
    padded = jax.tree.map(lambda leaf: _pad_time(leaf, -T % chunk), dual.in_float32(inputs))
    chunks = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, chunk, *leaf.shape[2:]), 1, 0), padded
    )

    def step(h, window):
        y = dual.window_outputs(h, window, D, dual.running_sums(rounded(window.dt * A[None, None])))
        return dual.window_end(h, window, A), y

    h, y = loops.scan(step, h0.astype(jnp.float32), chunks)
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :T], h


def _pad_time(leaf: jax.Array, amount: int) -> jax.Array:
    return jnp.pad(leaf, [(0, 0), (0, amount)] + [(0, 0)] * (leaf.ndim - 2))
