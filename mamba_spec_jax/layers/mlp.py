"""Gated feed-forward layers: dense, and routed among experts."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden


class GatedMLP(nnx.Module):
    """`output(silu(gate) * up)`, gate and up from one projection (Shazeer 2020)."""

    def __init__(self, size: int, intermediate: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.input_linear = linear(size, 2 * intermediate)
        self.output_linear = linear(intermediate, size)

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.input_linear(x), 2, axis=-1)
        return self.output_linear(jax.nn.silu(gate) * up)


class SparseMoE(nnx.Module):
    """Each token goes to the `top_k` experts its router likes best, weighted by the softmax over those.

    Tokens are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`), so an expert that nobody chose
    costs nothing where the device's ragged product skips empty groups.
    """

    def __init__(self, size: int, intermediate: int, experts: int, top_k: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        if not 0 < top_k <= experts:
            raise ValueError(f"SparseMoE routes to top_k={top_k} of {experts} experts, expected 1..{experts}")
        self.top_k = top_k
        self.dtype = dtype
        self.router = nnx.Linear(size, experts, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up_proj = nnx.Param(init(rngs.params(), (experts, size, 2 * intermediate), param_dtype))
        self.down_proj = nnx.Param(init(rngs.params(), (experts, intermediate, size), param_dtype))

    def __call__(self, x: Hidden) -> Hidden:
        tokens = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        logits, experts = jax.lax.top_k(self.router(tokens).astype(jnp.float32), self.top_k)
        weights = jax.nn.softmax(logits, axis=-1).astype(self.dtype)

        chosen = experts.reshape(-1)
        order = jnp.argsort(chosen)
        group_sizes = jnp.bincount(chosen, length=self.gate_up_proj.shape[0]).astype(jnp.int32)
        grouped = tokens[order // self.top_k]
        gate, up = jnp.split(_grouped_dot(grouped, self.gate_up_proj[...], group_sizes), 2, axis=-1)
        mixed = _grouped_dot(jax.nn.silu(gate) * up, self.down_proj[...], group_sizes)
        # Back to token order before summing, so that each token adds its experts in the order of its own choice.
        mixed = mixed[jnp.argsort(order)].reshape(*experts.shape, -1) * weights[..., None]
        return jnp.sum(mixed, axis=1).reshape(x.shape)


def _grouped_dot(rows: Array, weights: nnx.Param | Array, group_sizes: Array) -> Array:
    return jax.lax.ragged_dot(rows, jnp.asarray(weights, rows.dtype), group_sizes)
