"""Routers of mixture-of-experts layers: which experts a token goes to, and with which weights."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Float, Int32
from mamba_spec_jax.layers.projections import Linear, matmul
from pallas_kernels.arithmetic import alike


@dataclasses.dataclass(frozen=True)
class SigmoidRouting:
    """Scores by sigmoid, choice by corrected scores within the best groups (DeepSeek-V3, 2024, section 2.1).

    Attributes:
        groups: into which the experts fall, in order.
        top_groups: how many of them a token may choose from, those with the greatest sums of their two best.
        normalized: whether the weights of the chosen experts are made to sum to one.
        scale: of the weights.
    """

    groups: int = 1
    top_groups: int = 1
    normalized: bool = True
    scale: float = 1.0

    def __post_init__(self):
        if not 0 < self.top_groups <= self.groups:
            raise ValueError(f"SigmoidRouting has top_groups={self.top_groups}, expected 1..{self.groups} (groups)")

    def check(self, experts: int, top_k: int) -> None:
        """Raises ValueError where that many experts make no such groups, or no token could choose `top_k` of them."""
        if experts % self.groups or (self.groups > 1 and experts // self.groups < 2):
            raise ValueError(f"{experts} experts do not make {self.groups} groups of equally many, at least two")
        choice = experts // self.groups * self.top_groups
        if self.top_groups < self.groups and top_k > choice:  # the rest would be drawn from groups that are left out
            raise ValueError(
                f"a token is routed to {top_k} of the {choice} experts in its best {self.top_groups} of {self.groups} "
                "groups: expected more groups to choose from, or fewer experts a token"
            )


class SoftmaxRouter(Linear):
    """The experts with the greatest logits, weighted by the softmax over those, or over all."""

    def __init__(self, size: int, experts: int, *, over_chosen: bool = True, dtype, param_dtype, rngs: nnx.Rngs):
        super().__init__(size, experts, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.over_chosen = over_chosen

    def route(self, tokens: Float[Array, "n D"], top_k: int) -> tuple[Float[Array, "n k"], Int32[Array, "n k"]]:
        """Weights in float32 and experts, of each token."""
        logits = self(tokens).astype(jnp.float32)
        chosen, experts = jax.lax.top_k(logits, top_k)
        if self.over_chosen:
            return _softmax(chosen), experts
        return jnp.take_along_axis(_softmax(logits), experts, axis=-1), experts


class SigmoidRouter(nnx.Module):
    """`SigmoidRouting` of float32 logits; its weights stay float32 whatever the model's are."""

    def __init__(self, size: int, experts: int, routing: SigmoidRouting, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (size, experts), jnp.float32))
        self.correction = nnx.Param(jnp.zeros((experts,), jnp.float32))
        self.routing = routing

    def route(self, tokens: Float[Array, "n D"], top_k: int) -> tuple[Float[Array, "n k"], Int32[Array, "n k"]]:
        """Weights in float32 and experts, of each token."""
        kernel = self.kernel[...]
        scores = alike(jax.nn.sigmoid, matmul(tokens.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST))
        choice = scores + self.correction[...][None]
        if self.routing.top_groups < self.routing.groups:
            choice = jnp.where(self._in_best_groups(choice), choice, -jnp.inf)
        _, experts = jax.lax.top_k(choice, top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if self.routing.normalized:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights * self.routing.scale, experts

    def _in_best_groups(self, choice: Float[Array, "n E"]) -> Array:
        groups = self.routing.groups
        best_two, _ = jax.lax.top_k(choice.reshape(len(choice), groups, -1), 2)
        _, chosen = jax.lax.top_k(jnp.sum(best_two, axis=-1), self.routing.top_groups)
        in_group = jnp.any(chosen[:, :, None] == jnp.arange(groups, dtype=jnp.int32), axis=1)
        return jnp.repeat(in_group, choice.shape[-1] // groups, axis=-1)


def _softmax(logits: Float[Array, "n E"]) -> Float[Array, "n E"]:
    powers = alike(jnp.exp, logits - jnp.max(logits, axis=-1, keepdims=True))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)
