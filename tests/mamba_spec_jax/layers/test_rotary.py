"""Rotary embedding as what it is: a rotation of pairs, by an angle proportional to the position."""

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.layers.rotary import apply_rotary

THETA, DIM = 100.0, 6


def draw(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(1, tokens, 2, DIM)).astype(np.float32)


rotary = jax.jit(apply_rotary, static_argnums=(2, 3))


def rotate(x: np.ndarray, positions: list[int]) -> np.ndarray:
    return np.asarray(rotary(jnp.asarray(x), jnp.asarray([positions], jnp.int32), THETA))


def test_pairs_turn_as_complex_numbers():
    x, positions = draw(0, 4), [0, 1, 7, 300]
    frequencies = THETA ** (-2 * np.arange(DIM // 2) / DIM)
    turned = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * np.outer(positions, frequencies))[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(x, positions), expected, rtol=1e-4, atol=1e-5)


def test_dims_beyond_the_rotated_ones_stay():
    x, positions = draw(3, 4), jnp.asarray([[0, 1, 7, 300]], jnp.int32)
    turned = rotary(jnp.asarray(x), positions, THETA, 4)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], rotary(jnp.asarray(x[..., :4]), positions, THETA))
    np.testing.assert_array_equal(rotary(jnp.asarray(x), positions, THETA, DIM), rotate(x, [0, 1, 7, 300]))


def test_scores_depend_on_distance_alone():
    query, key = draw(1, 1), draw(2, 1)
    near, far = (np.sum(rotate(query, [at + 3]) * rotate(key, [at]), axis=-1) for at in (0, 50))
    np.testing.assert_allclose(near, far, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(rotate(query, [0]), query)
