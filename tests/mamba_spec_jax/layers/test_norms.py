"""Norms against their definition in float64; the rms is taken in float32 whatever the activations are."""

import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.layers.norms import GatedRMSNorm, RMSNorm, apply_gate

EPS = 1e-3


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rms_norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + EPS)


def test_rms_norm():
    norm = RMSNorm(6, eps=EPS, param_dtype=jnp.float32)
    weight, x = draw((6,), 0), draw((2, 3, 6), 1) * 0.05
    norm.weight[...] = jnp.asarray(weight)
    np.testing.assert_allclose(norm(jnp.asarray(x)), rms_norm(x) * weight, rtol=1e-5)


def test_zero_centered_weights_count_from_one_even_in_half_precision():
    norm = RMSNorm(6, eps=EPS, zero_centered=True, param_dtype=jnp.bfloat16)
    weight, x = jnp.asarray(draw((6,), 0) * 1e-3, jnp.bfloat16), draw((2, 3, 6), 1)
    norm.weight[...] = weight
    expected = rms_norm(x) * (1 + np.asarray(weight, np.float64))
    assert (1 + weight).astype(jnp.float32).tolist() != (1 + np.asarray(weight, np.float32)).tolist()
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_gated_rms_norm(groups):
    norm = GatedRMSNorm(6, groups=groups, eps=EPS, param_dtype=jnp.float32)
    weight, x, gate = draw((6,), 0), draw((2, 3, 6), 1), draw((2, 3, 6), 2)
    norm.weight[...] = jnp.asarray(weight)
    gated = x * gate / (1 + np.exp(-gate))
    expected = rms_norm(gated.reshape(2, 3, groups, -1)).reshape(2, 3, 6) * weight
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), expected, rtol=1e-5)


def test_gated_rms_norm_before_the_gate():
    norm = GatedRMSNorm(6, groups=3, eps=EPS, before_gate=True, param_dtype=jnp.float32)
    weight, x, gate = draw((6,), 0), draw((2, 3, 6), 1), draw((2, 3, 6), 2)
    norm.weight[...] = jnp.asarray(weight)
    expected = rms_norm(x.reshape(2, 3, 3, -1)).reshape(2, 3, 6) * weight * gate / (1 + np.exp(-gate))
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), expected, rtol=1e-5)
    np.testing.assert_allclose(apply_gate(jnp.asarray(x), jnp.asarray(gate)), x * gate / (1 + np.exp(-gate)), rtol=1e-5)


def test_a_gate_may_be_a_sigmoid():
    norm = GatedRMSNorm(6, eps=EPS, before_gate=True, gate="sigmoid", param_dtype=jnp.float32)
    x, gate = draw((2, 3, 6), 1), draw((2, 3, 6), 2)
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(gate)), rms_norm(x) / (1 + np.exp(-gate)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_squares_do_not_overflow_in_half_precision(dtype):
    x = jnp.full((1, 1, 4), 1000, dtype)  # its square is beyond float16
    norm = RMSNorm(4, eps=EPS, param_dtype=dtype)
    gated = GatedRMSNorm(4, groups=2, eps=EPS, param_dtype=dtype)
    for output in (norm(x), gated(x, x)):
        assert output.dtype == dtype
        np.testing.assert_array_equal(output.astype(jnp.float32), 1)


def test_groups_must_divide():
    with pytest.raises(ValueError, match="GatedRMSNorm of size 6 cannot be split into 4 equal groups"):
        GatedRMSNorm(6, groups=4, eps=EPS, param_dtype=jnp.float32)
