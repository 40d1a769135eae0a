"""What is left of the two distributions once a draft was rejected."""

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
