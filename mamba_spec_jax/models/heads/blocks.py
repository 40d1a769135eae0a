"""The parts of a draft head, named as published checkpoints name them; attention over what was read is the caller's."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Array, Hidden, Tokens
from mamba_spec_jax.attention.base import AttentionInputs
from mamba_spec_jax.layers.norms import RMSNorm
from mamba_spec_jax.layers.projections import Linear
from mamba_spec_jax.layers.rotary import apply_rotary
from mamba_spec_jax.models.heads.config import HeadConfig
from pallas_kernels.arithmetic import alike

# From queries, keys and values `[B, T, heads, Dh]` to what each query mixes, `[B, T, Hq, Dh]`.
Attend = Callable[[AttentionInputs], Array]


class SelfAttention(nnx.Module):
    """Projections of grouped-query attention with rotary positions, normed per head where the checkpoint does so."""

    def __init__(self, config: HeadConfig, input_size: int, *, head_norms: bool, dtype, param_dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.config = config
        self.q_proj = linear(input_size, config.num_attention_heads * config.head_dim)
        self.k_proj = linear(input_size, config.num_key_value_heads * config.head_dim)
        self.v_proj = linear(input_size, config.num_key_value_heads * config.head_dim)
        self.o_proj = linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        norm = functools.partial(RMSNorm, config.head_dim, eps=config.norm_eps, param_dtype=param_dtype)
        self.q_norm = norm() if head_norms else None
        self.k_norm = norm() if head_norms else None

    def query(self, x: Hidden, positions: Tokens) -> Array:
        return self._turned(self._heads(self.q_proj(x)), self.q_norm, positions)

    def key_value(self, x: Hidden, positions: Tokens) -> tuple[Array, Array]:
        return self._turned(self._heads(self.k_proj(x)), self.k_norm, positions), self._heads(self.v_proj(x))

    def __call__(self, x: Hidden, positions: Tokens, attend: Attend) -> Hidden:
        return self.output(attend(AttentionInputs(self.query(x, positions), *self.key_value(x, positions))))

    def output(self, mixed: Array) -> Hidden:
        return self.o_proj(mixed.reshape(*mixed.shape[:2], -1))

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def _turned(self, x: Array, norm: RMSNorm | None, positions: Tokens) -> Array:
        config, x = self.config, x if norm is None else norm(x)
        if config.rope_theta is None:
            return x
        return apply_rotary(x, positions, config.rope_theta, config.rotary_dim, config.rope_scaling)


class MLP(nnx.Module):
    """`down(silu(gate) * up)`."""

    def __init__(self, size: int, intermediate: int, *, dtype, param_dtype, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = linear(size, intermediate)
        self.up_proj = linear(size, intermediate)
        self.down_proj = linear(intermediate, size)

    def __call__(self, x: Hidden) -> Hidden:
        return self.down_proj(alike(jax.nn.silu, self.gate_proj(x)) * self.up_proj(x))


def join(first: Array, second: Array) -> Array:
    return jnp.concatenate([first, second], axis=-1)
