"""Order between the reads and the writes of a buffer that is updated in place."""

import jax
import jax.numpy as jnp


def available_after(indices: jax.Array, value: jax.Array) -> jax.Array:
    """int32 `indices [B]` with a data dependency on the float `value [B, ...]`.

    Where a write may come before an earlier read of the same buffer, XLA copies the buffer. An optimization barrier
    does not hold on a CPU, where it is dropped before copies are decided, so the order is a data dependency: clearing a
    number's sign bit leaves nothing below zero, which XLA does not know.
    """
    if value.size == 0:
        return indices
    first = value[(slice(None), *(0,) * (value.ndim - 1))]
    magnitude = jax.lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return indices + jnp.minimum(magnitude, 0)
