"""The products of a traced program, and whether a token's bits depend on where its row stands."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

# Tokens of the traced windows: a size that no weight of the tiny models has, nor twice or three times it.
TOKENS = 13
# Rows that a product is run with. XLA's loops over rows take 4, 8 or 16 at a time: each count leaves others over.
ROWS = (13, 39)
MORE_ROWS = (3, 6, 9, 20, 31)  # in tests/sweeps


class Product(NamedTuple):
    """A `dot_general` of a program.

    Attributes:
        left, right: shapes, in which `TOKENS` is written for the axes that count tokens, whatever multiple it was.
        options: what else `jax.lax.dot_general` is called with.
        dtypes: of both.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    dtypes: tuple[str, str]


def products_of(jaxpr: Any) -> Iterator[Product]:
    """Every product of a jaxpr, those of scans and calls included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            names = ("dimension_numbers", "precision", "preferred_element_type")
            options = tuple((name, equation.params[name]) for name in names)
            operands = [operand.aval for operand in equation.invars]
            shapes = (tuple(TOKENS if size % TOKENS == 0 else size for size in operand.shape) for operand in operands)
            yield Product(*shapes, options, tuple(str(operand.dtype) for operand in operands))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products_of(inner)


def depend_on_place(products: list[Product], rows: int) -> list[Product]:
    """Those whose results change when the axes of tokens, `rows` long, are rolled and the results rolled back."""
    draws = np.random.default_rng(rows)
    operands = [[_draw(draws, product, side, rows) for side in (0, 1)] for product in products]

    @jax.jit
    def run(operands):
        return [jax.lax.dot_general(*pair, **dict(p.options)) for p, pair in zip(products, operands, strict=True)]

    results, found = run(operands), set()
    for shift in range(1, rows, max(1, rows // 5)):
        rolled = [
            [_rolled(operand, _token_axes(p[side]), shift) for side, operand in enumerate(pair)]
            for p, pair in zip(products, operands, strict=True)
        ]
        for product, before, after in zip(products, results, run(rolled), strict=True):
            expected = _rolled(before, _result_axes(product), shift)
            if np.asarray(expected).tobytes() != np.asarray(after).tobytes():
                found.add(product)
    return sorted(found, key=str)


def _token_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(shape) if size == TOKENS)


def _result_axes(product: Product) -> tuple[int, ...]:
    """Axes of the result that count tokens."""
    (contracted, batch) = dict(product.options)["dimension_numbers"]
    sizes = [product.left[axis] for axis in batch[0]]
    for shape, gone, shared in zip((product.left, product.right), contracted, batch, strict=True):
        sizes += [size for axis, size in enumerate(shape) if axis not in (*gone, *shared)]
    return _token_axes(tuple(sizes))


def _draw(draws: np.random.Generator, product: Product, side: int, rows: int) -> jax.Array:
    shape = tuple(rows if size == TOKENS else size for size in product[side])
    return jnp.asarray(draws.normal(size=math.prod(shape)).reshape(shape), product.dtypes[side])


def _rolled(x: jax.Array, axes: tuple[int, ...], shift: int) -> jax.Array:
    return jnp.roll(x, [shift] * len(axes), axes)
