"""Tiny random hybrid models that the tests of whole steps share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel

_SHAPE = {
    "model_type": "granitemoehybrid",
    "vocab_size": 29,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "attention_scale": 0.3,
    "mamba_heads": 3,
    "mamba_head_dim": 5,
    "mamba_state": 9,
    "mamba_conv_width": 4,
    "mamba_chunk_size": 4,
    "shared_intermediate_size": 20,
    "residual_multiplier": 0.7,
}
DENSE = HybridConfig(**_SHAPE, layer_types=("mamba", "attention", "mamba"), mamba_groups=1)
# Rotary positions, routed experts, groups, tied embeddings, attention first and last.
MOE = HybridConfig(
    **(_SHAPE | {"mamba_heads": 6, "mamba_conv_width": 3}),
    layer_types=("attention", "mamba", "mamba", "attention"),
    mamba_groups=3,
    mamba_conv_bias=False,
    rope_theta=10_000.0,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=10,
    tie_embeddings=True,
    embedding_multiplier=3.0,
    logits_divisor=2.0,
)
CONFIGS = {"dense": DENSE, "moe": MOE}


@functools.cache
def random_params(model: HybridModel, seed: int = 0):
    """Weights in which nothing is zero or one: biases, norms and skips count too. Much cheaper than `init_params`."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        scale, offset = (0.3, 0.5) if len(leaf.shape) < 2 else (leaf.shape[-2] ** -0.5, 0)
        return jnp.asarray(rng.normal(offset, scale, leaf.shape).astype(np.float32).astype(leaf.dtype))

    return jax.tree.map(draw, model.abstract_params())
