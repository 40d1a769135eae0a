"""Projections: products of token rows with weights, low-rank ones, and constant scales."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Float, Hidden, Int32
from pallas_kernels import dispatch, loops
from pallas_kernels.arithmetic import rounded

# Of a block of rows in a grouped product on a CPU: fewer are no faster, and more hide no more of reading a matrix.
_LEAST_ROWS, _MOST_ROWS = 4, 64


def matmul(
    rows: Float[Array, "... D"], weight: Float[Array, "D N"], *, precision: Any = None, dtype: Any = None
) -> Float[Array, "... N"]:
    """`rows @ weight`, where a row's bits do not depend on its index among the rows, nor on the other rows.

    Every projection of a verify pass is computed here or by `grouped_matmul`. XLA's product on a CPU has this property
    for two columns and more; a product of one column sums the last `n % 8` rows in another order (measured on jax
    0.10.2 and 0.12), so that one is a sum over each row.

    Args:
        rows: of tokens.
        weight: same dtype.
        precision: of `jax.lax.dot_general`.
        dtype: of the result, the rows' by default.
    """
    if _sums_rows(weight.shape[-1]):
        return _summed(rows, jnp.expand_dims(weight[:, 0], range(rows.ndim - 1)), dtype)
    return jnp.matmul(rows, weight, precision=precision, preferred_element_type=dtype)


def grouped_matmul(
    rows: Float[Array, "n D"], weights: Float[Array, "E D N"], group_sizes: Int32[Array, "E"]
) -> Float[Array, "n N"]:
    """Each group of rows times a matrix; a row's bits depend on neither its index nor other rows, as in `matmul`.

    On a CPU, blocks of rows of one group are multiplied one after another, so that only matrices of groups with rows
    are read; XLA makes a product over all groups of `jax.lax.ragged_dot` there, 800 times slower with 256 groups and
    4 rows.

    Args:
        rows: in order of their groups.
        weights: a matrix for each group, same dtype.
        group_sizes: how many rows each group has; n in sum.
    """
    if dispatch.target().platform != "cpu":
        return jax.lax.ragged_dot(rows, weights, group_sizes)
    if weights.shape[-1] == 1:
        groups = jnp.repeat(jnp.arange(len(weights), dtype=jnp.int32), group_sizes, total_repeat_length=len(rows))
        return _summed(rows, weights[groups, :, 0], None)
    return _block_by_block(rows, weights, group_sizes)


class Linear(nnx.Linear):
    """`x @ kernel + bias` by `matmul`; arguments as `flax.nnx.Linear`'s."""

    def __init__(self, size: int, output: int, *, use_bias: bool = True, dtype, param_dtype, rngs: nnx.Rngs):
        super().__init__(
            size, output, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs, dot_general=_dot_general
        )


class LowRank(nnx.Module):
    """`up(down(x))` through `rank` dims (Hu et al. 2021)."""

    def __init__(self, size: int, output: int, *, rank: int, dtype, param_dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(size, rank)
        self.up = linear(rank, output)

    def __call__(self, x: Hidden) -> Hidden:
        return self.up(self.down(x))


def scaled(x: Array, multiplier: float) -> Array:
    """`x * multiplier`; nothing where that is one."""
    return x if multiplier == 1 else x * multiplier


def _dot_general(rows: Array, kernel: Array, dimension_numbers: Any, *, precision: Any, out_sharding: Any) -> Array:
    """`matmul` with the arguments that `flax.nnx.Linear` passes, which always contract the last axis with the first."""
    return matmul(rows, kernel, precision=precision)


def _block_by_block(rows: Array, weights: Array, group_sizes: Array) -> Array:
    n, groups = len(rows), len(weights)
    size = min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (n // groups).bit_length()))
    blocks = -(-group_sizes // size)  # of each group
    last = jnp.cumsum(blocks, dtype=jnp.int32)
    index = jnp.arange(min(n, groups) + n // size, dtype=jnp.int32)  # of as many blocks as there can be
    group = jnp.minimum(jnp.searchsorted(last, index, side="right").astype(jnp.int32), groups - 1)
    starts = (jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes)[group] + (index - (last - blocks)[group]) * size
    padded = jnp.pad(rows, ((0, size), (0, 0)))

    def multiply(i, products):
        weight = jax.lax.dynamic_index_in_dim(weights, group[i], keepdims=False)
        product = jnp.matmul(jax.lax.dynamic_slice_in_dim(padded, starts[i], size), weight)
        # Rows after the group's last one belong to the next block, which overwrites them.
        return jax.lax.dynamic_update_slice_in_dim(products, product, starts[i], axis=0)

    empty = jnp.zeros((n + size, weights.shape[-1]), rows.dtype)
    return loops.fori_loop(jnp.int32(0), last[-1], multiply, empty)[:n]


def _sums_rows(columns: int) -> bool:
    return columns == 1 and dispatch.target().platform == "cpu"


def _summed(rows: Array, columns: Array, dtype: Any) -> Array:
    """`[..., 1]` the sum of each row's products, in float32. Products are rounded, so that none is fused with a sum."""
    products = rounded(rows.astype(jnp.float32) * columns.astype(jnp.float32))
    return jnp.sum(products, axis=-1, keepdims=True).astype(dtype or rows.dtype)
