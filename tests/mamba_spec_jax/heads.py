"""Tiny random draft heads that several tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.models.heads.dflash import DFlash
from mamba_spec_jax.models.heads.eagle import Eagle3, MultiTokenPrediction
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import DTypePolicy

KINDS = {
    "eagle3": (Eagle3, {"target_layers": (0, 2), "draft_vocab_size": 17}),
    "one layer": (MultiTokenPrediction, {"target_layers": (2,)}),
    "three layers": (MultiTokenPrediction, {"target_layers": (2,), "num_layers": 3}),
    "dflash": (DFlash, {"target_layers": (0, 1, 2), "num_layers": 2}),
}


def head_config(kind: str, model: HybridModel) -> HeadConfig:
    return HeadConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=10,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        vocab_size=model.vocab_size,
        embedding_multiplier=model.config.embedding_multiplier,
        logits_divisor=model.config.logits_divisor,
        **KINDS[kind][1],
    )


def random_module(kind: str, config: HeadConfig, seed: int = 0) -> nnx.Module:
    """A head in which no weight is zero or one; EAGLE-3's can propose every other token first."""
    module = nnx.eval_shape(lambda: KINDS[kind][0](config, DTypePolicy(), nnx.Rngs(0)))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    rng = np.random.default_rng(seed)

    def draw(leaf):
        scale, offset = (0.3, 1.0) if len(leaf.shape) < 2 else (leaf.shape[-2] ** -0.5, 0)
        return jnp.asarray(rng.normal(offset, scale, leaf.shape), jnp.float32)

    params = jax.tree.map(draw, params)
    if kind == "eagle3":
        tokens = np.sort(rng.permutation(config.vocab_size)[: config.draft_vocab_size])
        chosen = {"d2t": tokens - np.arange(tokens.size), "t2d": np.isin(np.arange(config.vocab_size), tokens)}
        rest = nnx.from_flat_state(
            [(path, leaf.replace(jnp.asarray(chosen[path[-1]], leaf.dtype))) for path, leaf in nnx.to_flat_state(rest)]
        )
    return nnx.merge(graphdef, params, rest)
