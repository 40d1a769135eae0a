"""The op in plain JAX: one solved window a chunk, the state carried from chunk to chunk."""

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.gated_delta_update.recurrence import Tokens, unit_tokens
from pallas_kernels.gated_delta_update.window import last_state, outputs, solve


def chunk_scan(state: jax.Array, tokens: Tokens, scale: float, chunk_size: int) -> tuple[jax.Array, jax.Array]:
    """Outputs `[B, T, Hv, V]` and the last state `[B, Hv, V, K]`, both float32; the last chunk may be short."""
    T = tokens.k.shape[1]
    chunk = min(chunk_size, T)

    def chunks(leaf):
        padded = jnp.pad(leaf, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(leaf.shape[0], -1, chunk, *leaf.shape[2:]), 1, 0)

    def step(state, window):
        solved = solve(state, unit_tokens(window, scale), None)
        return last_state(solved), outputs(solved)

    state, o = loops.scan(step, state.astype(jnp.float32), jax.tree.map(chunks, tokens))
    o = jnp.moveaxis(o, 0, 1)
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T], state
