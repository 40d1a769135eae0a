"""Feed-forward layers: dense, and routed among experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden
from mamba_spec_jax.layers.projections import Linear, LowRank, grouped_matmul, scaled
from mamba_spec_jax.layers.routing import SigmoidRouter, SigmoidRouting, SoftmaxRouter
from pallas_kernels.arithmetic import alike

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class GatedMLP(nnx.Module):
    """`output(act(gate) * up)`, gate and up from one projection (Shazeer 2020).

    `gate_multiplier` scales what the activation reads, `multiplier` what the layer gives.
    """

    def __init__(
        self, size: int, intermediate: int, *, activation: str = "silu", bias: bool = False,
        gate_multiplier: float = 1.0, multiplier: float = 1.0, dtype, param_dtype, rngs: nnx.Rngs,
    ):  # fmt: skip
        linear = functools.partial(Linear, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.input_linear = linear(size, 2 * intermediate)
        self.output_linear = linear(intermediate, size)
        self.activation = activation
        self.gate_multiplier = gate_multiplier
        self.multiplier = multiplier

    def __call__(self, x: Hidden, adapter: LowRank | None = None) -> Hidden:
        """`adapter` adds to the projection: a layer's own part in weights that it shares."""
        projected = self.input_linear(x)
        if adapter is not None:
            projected = projected + adapter(x)
        gate, up = jnp.split(projected, 2, axis=-1)
        gate = scaled(gate, self.gate_multiplier)
        return scaled(self.output_linear(alike(ACTIVATIONS[self.activation], gate) * up), self.multiplier)


class MLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(
        self, size: int, intermediate: int, *, activation: str, bias: bool = False, dtype, param_dtype, rngs: nnx.Rngs
    ):
        linear = functools.partial(Linear, use_bias=bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.up_proj = linear(size, intermediate)
        self.down_proj = linear(intermediate, size)
        self.activation = activation

    def __call__(self, x: Hidden) -> Hidden:
        return self.down_proj(alike(ACTIVATIONS[self.activation], self.up_proj(x)))


class SparseMoE(nnx.Module):
    """Each token goes to the `top_k` experts its router likes best, summed with the router's weights.

    Tokens are sorted by expert and multiplied group by group (`grouped_matmul`), so on a CPU an expert that nobody
    chose costs nothing. Experts are gated like `GatedMLP`, or plain like `MLP`; with a `latent` size they read and give
    that many dims, projected from and to `size`.
    """

    def __init__(
        self, size: int, intermediate: int, experts: int, top_k: int, *, gated: bool = True, activation: str = "silu",
        routing: SigmoidRouting | None = None, over_chosen: bool = True, latent: int = 0, bias: bool = False,
        dtype, param_dtype, rngs: nnx.Rngs,
    ):  # fmt: skip
        if not 0 < top_k <= experts:
            raise ValueError(f"SparseMoE routes to top_k={top_k} of {experts} experts, expected 1..{experts}")
        if routing is not None:
            routing.check(experts, top_k)
        self.top_k = top_k
        self.gated = gated
        self.activation = activation
        self.dtype = dtype
        dtypes: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.router: SoftmaxRouter | SigmoidRouter = (
            SoftmaxRouter(size, experts, over_chosen=over_chosen, **dtypes)
            if routing is None
            else SigmoidRouter(size, experts, routing, rngs=rngs)
        )
        width = latent or size
        self.latent_in = Linear(size, latent, use_bias=bias, **dtypes) if latent else None
        self.latent_out = Linear(latent, size, use_bias=bias, **dtypes) if latent else None
        init = nnx.initializers.lecun_normal(batch_axis=0)
        first = nnx.Param(init(rngs.params(), (experts, width, (1 + gated) * intermediate), param_dtype))
        if gated:
            self.gate_up_proj = first
        else:
            self.up_proj = first
        self.down_proj = nnx.Param(init(rngs.params(), (experts, intermediate, width), param_dtype))

    def __call__(self, x: Hidden) -> Hidden:
        tokens = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        weights, experts = self.router.route(tokens, self.top_k)
        weights = weights.astype(self.dtype)
        if self.latent_in is not None:
            tokens = self.latent_in(tokens)

        chosen = experts.reshape(-1)
        order = jnp.argsort(chosen).astype(jnp.int32)
        group_sizes = jnp.bincount(chosen, length=self.down_proj.shape[0]).astype(jnp.int32)
        expanded = self._expand(tokens[order // self.top_k], group_sizes)
        mixed = grouped_matmul(expanded, self._weights(self.down_proj), group_sizes)
        # Back to token order before summing, so that a token's sum has the order of its own choice of experts.
        mixed = mixed[jnp.argsort(order)].reshape(*experts.shape, -1) * weights[..., None]
        total = jnp.sum(mixed, axis=1)
        if self.latent_out is not None:
            total = self.latent_out(total)
        return total.reshape(x.shape)

    def _expand(self, grouped: Array, group_sizes: Array) -> Array:
        act = functools.partial(alike, ACTIVATIONS[self.activation])
        if not self.gated:
            return act(grouped_matmul(grouped, self._weights(self.up_proj), group_sizes))
        gate, up = jnp.split(grouped_matmul(grouped, self._weights(self.gate_up_proj), group_sizes), 2, axis=-1)
        return act(gate) * up

    def _weights(self, param: nnx.Param) -> Array:
        return param[...].astype(self.dtype)
