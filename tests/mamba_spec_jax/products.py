"""What of a traced program may give a token other bits at another index: products, and what vector loops leave over."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.extend.source_info_util
import jax.numpy as jnp
import numpy as np

# Tokens of the traced windows: a size that no weight of the tiny models has, nor twice or three times it.
TOKENS = 13
# Rows that a product is run with. XLA's loops over rows take 4, 8 or 16 at a time: each count leaves others over.
ROWS = (13, 39)
MORE_ROWS = (3, 6, 9, 20, 31)  # in tests/sweeps
# Functions that a CPU's vector loop approximates otherwise than the code for what is left over; whole vectors have 16.
APPROXIMATED = {
    "cbrt", "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "tan", "tanh"
}  # fmt: skip
LANES = 16


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


def leftovers_of(jaxpr: Any) -> Iterator[str]:
    """Every approximated function of numbers that tokens have, where their count is no multiple of a vector's."""
    for equation in jaxpr.eqns:
        name, shapes = equation.primitive.name, {operand.aval.shape for operand in equation.invars}
        if name in APPROXIMATED and any(
            math.prod(shape) % LANES and math.prod(shape) % TOKENS == 0 for shape in shapes
        ):
            yield f"{name} of {sorted(shapes)} at {jax.extend.source_info_util.summarize(equation.source_info)}"
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from leftovers_of(inner)


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
