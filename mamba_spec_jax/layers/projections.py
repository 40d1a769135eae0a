"""Small pieces between layers: low-rank projections and constant scales."""

import functools

from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden


class LowRank(nnx.Module):
    """`up(down(x))` through `rank` dims (Hu et al. 2021)."""

    def __init__(self, size: int, output: int, *, rank: int, dtype, param_dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.down = linear(size, rank)
        self.up = linear(rank, output)

    def __call__(self, x: Hidden) -> Hidden:
        return self.up(self.down(x))


def scaled(x: Array, multiplier: float) -> Array:
    """`x * multiplier`; nothing where that is one."""
    return x if multiplier == 1 else x * multiplier
