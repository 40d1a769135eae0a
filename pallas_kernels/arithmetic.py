"""What keeps the bits of a result the same in every program that computes it.

A compiler is free to fuse a product with the addition that follows, to compute an exponential one way in a vector loop
and another way next to other work, and to add up a contraction in any order. The last bit then depends on the code
around an expression, and decoding one token would not have the bits of verifying several.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

_LANES = 16  # numbers of the widest vector a CPU works on


def rounded(product: jax.Array) -> jax.Array:
    """A float32 product that is rounded before it is added to anything.

    A lower bound, the least finite number, keeps product and sum apart, and changes nothing but an
    overflow to -inf.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def fenced(values: Any) -> Any:
    """A pytree of values, each computed once and stored in its dtype, not recomputed inside whatever reads it."""
    return jax.lax.optimization_barrier(values)


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


def alike(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """An elementwise function whose bits do not depend on how many numbers it is given, nor on an element's index.

    A CPU's vector loop computes an exponential otherwise than the code for what is left over (measured on jax 0.10.2:
    sizes of 3, 5, 6, 7 and 15; on 0.12 a silu of `[25, 7]`), so there nothing may be left over: the loop is over whole
    vectors. A GPU's threads compute one number each.
    """
    if dispatch.target().platform != "cpu":
        return function(x)
    padded = fenced(jnp.pad(x.reshape(-1), (0, -x.size % _LANES)).reshape(-1, _LANES))
    return fenced(function(padded)).reshape(-1)[: x.size].reshape(x.shape)


def log_softmax(x: jax.Array) -> jax.Array:
    """`jax.nn.log_softmax` over the last axis, with bits that do not depend on a row's index."""
    shifted = x - jnp.max(x, axis=-1, keepdims=True)
    return shifted - alike(jnp.log, jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
