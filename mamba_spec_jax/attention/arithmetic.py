"""What keeps the bits of a result the same in every program that computes it.

A compiler is free to fuse a product with the addition that follows, and to compute an exponential one way in a vector
loop and another way next to other work. The last bit then depends on the code around an expression, and decoding one
token would not have the bits of verifying several.
"""

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array


def rounded(product: Array) -> Array:
    """A float32 product that is rounded before it is added to anything.

    Bounding it from below by the least finite number stands between product and sum, and changes nothing but an
    overflow to -inf.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def fenced(value: Array) -> Array:
    """A value computed by itself, into a buffer of its own, rather than again inside whatever reads it."""
    return jax.lax.optimization_barrier(value)
