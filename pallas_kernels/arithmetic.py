"""What keeps the bits of a result the same in every program that computes it.

A compiler is free to fuse a product with the addition that follows, to compute an exponential one way in a vector loop
and another way next to other work, and to add up a contraction in any order. The last bit then depends on the code
around an expression, and decoding one token would not have the bits of verifying several.
"""

import jax
import jax.numpy as jnp


def rounded(product: jax.Array) -> jax.Array:
    """A float32 product that is rounded before it is added to anything.

    Bounding it from below by the least finite number stands between product and sum, and changes nothing but an
    overflow to -inf.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def fenced(value: jax.Array) -> jax.Array:
    """A value computed by itself, into a buffer of its own, rather than again inside whatever reads it."""
    return jax.lax.optimization_barrier(value)


def contract(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    """`matrix [..., M, N]` times `vector [..., N]`, with bits that depend on nothing else in either.

    Summed pairwise, halves onto halves: a library's product may add in another order for another row, and a plain sum
    over the innermost axis is not vectorised on a CPU.
    """
    terms = rounded(matrix * vector[..., None, :])
    while (n := terms.shape[-1]) > 1:
        pairs = terms[..., : n // 2] + terms[..., n // 2 : n // 2 * 2]
        terms = jnp.concatenate([pairs, terms[..., n // 2 * 2 :]], axis=-1) if n % 2 else pairs
    return terms[..., 0]
