"""The two distributions of rejection sampling: the draft's as it came, and what is left once a draft was rejected."""

import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Rows


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """What is left of p once a draft from q was rejected: max(p - q, 0), not normalised; p where that is zero."""
    rest = jnp.maximum(p - q, 0)
    return jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p)


def without(q: Float[Array, "B V"], tokens: Rows) -> Float[Array, "B V"]:
    """The distribution of the next sibling, drawn from q without replacement after `tokens`; zero if q had no other."""
    rest = jnp.where(jnp.arange(q.shape[-1], dtype=jnp.int32)[None] == tokens[:, None], 0, q)
    return normalised(rest)


def normalised(weights: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Weights divided by their sum, zeros where there are none."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def drawn_from(probs: Float[Array, "*N V"]) -> Float[Array, "*N V"]:
    """`probs` in float32, and zero wherever they are no distribution: nothing can have been drawn from those.

    A distribution is finite, nowhere below zero, and sums to 1 within 1 %, which half-precision rounding stays within.
    """
    q = probs.astype(jnp.float32)
    total = jnp.sum(q, axis=-1, keepdims=True)  # NaN or infinite where a value is
    valid = (jnp.abs(total - 1) <= 0.01) & (jnp.min(q, axis=-1, keepdims=True) >= 0)
    return jnp.where(valid, q, 0)
