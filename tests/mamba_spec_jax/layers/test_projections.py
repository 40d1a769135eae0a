"""Projections: a row's bits are the same at every index of the batch and next to any other rows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_spec_jax.layers.projections import Linear, grouped_matmul, matmul

WIDTHS, SIZES, ROWS = (1, 2, 3, 31), (8, 33), (2, 9, 15, 20, 31, 39)
SHAPES = list(itertools.product(WIDTHS, SIZES, ROWS))
DTYPES = ("float32", "bfloat16", "float16")


def draw(seed: int, dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def same_bits(ours, theirs) -> bool:
    return np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_wherever_they_stand(dtype):
    weights = {(N, D): draw(N, dtype, D, N) for N, D in itertools.product(WIDTHS, SIZES)}
    rows = [draw(R, dtype, R, D) for _, D, R in SHAPES]

    @jax.jit
    def run(rows):
        return [matmul(x, weights[N, D]) for x, (N, D, _) in zip(rows, SHAPES, strict=True)]

    before, moved = run(rows), set()
    for shift in (1, 2, 5, 8, 13):
        after = run([jnp.roll(x, shift, 0) for x in rows])
        moved |= {
            shape for shape, x, y in zip(SHAPES, before, after, strict=True) if not same_bits(jnp.roll(x, shift, 0), y)
        }
    assert not moved


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_column_is_the_product(dtype):
    x, weight = draw(0, dtype, 2, 9, 12), draw(1, dtype, 12, 1)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(matmul(x, weight, dtype=jnp.float32), exact, rtol=1e-6, atol=1e-6)
    rounding = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    assert matmul(x, weight).dtype == dtype
    np.testing.assert_allclose(np.asarray(matmul(x, weight), np.float64), exact, rtol=rounding, atol=1e-6)
    layer = Linear(12, 1, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.ones(1, dtype)
    assert same_bits(layer(x), matmul(x, layer.kernel[...]) + jnp.ones(1, dtype))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_a_group_keep_their_bits(width):
    """Whatever the sizes of the groups before it are: these depend on what other tokens choose."""
    weights, rows = draw(0, "float32", 3, 12, width), draw(1, "float32", 23, 12)
    run = jax.jit(grouped_matmul)
    apart = [run(rows, weights, jnp.eye(3, dtype=jnp.int32)[group] * 23) for group in range(3)]
    for sizes in ([9, 0, 14], [1, 21, 1], [5, 5, 13], [0, 2, 21]):
        groups = np.repeat(np.arange(3), sizes)
        together = run(rows, weights, jnp.asarray(sizes, jnp.int32))
        assert same_bits(together, np.stack([apart[group][row] for row, group in enumerate(groups)]))


@pytest.mark.parametrize("rows", [1, 4, 23, 200])
@pytest.mark.parametrize("groups", [1, 5, 64])
def test_a_grouped_product_is_that_of_each_row(rows, groups):
    """Few rows for many groups, and many for few: several blocks of a group, and groups without rows."""
    draws = np.random.default_rng(rows + groups)
    sizes = np.bincount(draws.integers(0, groups, rows), minlength=groups).astype(np.int32)
    x, weights = draw(0, "float32", rows, 12), draw(1, "float32", groups, 12, 7)
    exact = np.einsum("nd,nde->ne", x, np.asarray(weights, np.float64)[np.repeat(np.arange(groups), sizes)])
    np.testing.assert_allclose(jax.jit(grouped_matmul)(x, weights, sizes), exact, rtol=1e-5, atol=1e-5)


def test_a_grouped_product_reads_only_matrices_of_groups_with_rows():
    """Read from the compiled program: no product is over all groups, and no temporary as large as the weights."""
    x, weights, sizes = draw(0, "float32", 4, 64), draw(1, "float32", 256, 64, 32), np.zeros(256, np.int32)
    compiled = jax.jit(grouped_matmul).lower(x, weights, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weights.nbytes / 32
    assert compiled.cost_analysis()["flops"] < 1e6  # of one block; all groups' are 4 million
