"""Tiny random hybrid models that the tests of whole steps share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.models.config import BranchMultipliers, HybridConfig, SharedBlocks
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.recurrent_config import Mamba2Config

MAMBA = Mamba2Config(heads=3, head_dim=5, state=9, groups=1, conv_width=4, chunk_size=4)
_SHAPE = {
    "model_type": "granitemoehybrid",
    "vocab_size": 29,
    "hidden_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "attention_scale": 0.3,
    "recurrent": MAMBA,
    "shared_intermediate_size": 20,
    "residual_multiplier": 0.7,
}
DENSE = HybridConfig(**_SHAPE, layer_types=("mamba", "attention", "mamba"))
# Rotary positions, routed experts, groups, tied embeddings, attention first and last.
MOE = HybridConfig(
    **(_SHAPE | {"recurrent": dataclasses.replace(MAMBA, heads=6, conv_width=3, groups=3, conv_bias=False)}),
    layer_types=("attention", "mamba", "mamba", "attention"),
    rope_theta=10_000.0,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=10,
    tie_embeddings=True,
    embedding_multiplier=3.0,
    logits_divisor=2.0,
)
CONFIGS = {"dense": DENSE, "moe": MOE}
# The other ways in which layers are made up: recurrence alone, both mixers in a layer, one part a layer, shared blocks.
_ALONE = {"separate_feed_forward": True}
PURE = HybridConfig(
    **{name: value for name, value in _SHAPE.items() if name.startswith(("recurrent", "model", "vocab", "hidden"))},
    **_ALONE,
    layer_types=("mamba", "mamba"),
    residual_in_fp32=True,
)
PARALLEL = HybridConfig(
    **(_SHAPE | {"recurrent": dataclasses.replace(MAMBA, norm="none")}),
    layer_types=("parallel", "parallel"),
    multipliers=BranchMultipliers(0.9, 1.3, 1.2, 0.7, (0.8, 1.3, 0.6, 1.1, 0.5), 0.7, 1.4),
)
APART = HybridConfig(
    **_SHAPE,
    **_ALONE,
    layer_types=("mamba", "moe", "attention", "mlp", "mamba"),
    mlp_intermediate_size=14,
    mlp_activation="relu2",
    mlp_gated=False,
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=10,
    expert_latent_size=5,
    sigmoid_routing=SigmoidRouting(groups=2, scale=2.0),
)
SHARED = HybridConfig(
    **(_SHAPE | {"num_key_value_heads": 4}),
    **_ALONE,
    layer_types=("shared", "mamba", "shared", "shared"),
    mlp_activation="gelu",
    shared_blocks=SharedBlocks(count=2, adapter_rank=3, adapts_attention=True),
)
MADE_UP = {"pure": PURE, "parallel": PARALLEL, "apart": APART, "shared": SHARED}


@functools.cache
def random_params(model: HybridModel, seed: int = 0):
    """Weights in which nothing is zero or one: biases, norms and skips count too. Much cheaper than `init_params`."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        scale, offset = (0.3, 0.5) if len(leaf.shape) < 2 else (leaf.shape[-2] ** -0.5, 0)
        return jnp.asarray(rng.normal(offset, scale, leaf.shape).astype(np.float32).astype(leaf.dtype))

    return jax.tree.map(draw, model.abstract_params())
