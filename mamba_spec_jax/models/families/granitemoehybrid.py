"""granitemoehybrid, the Granite 4.0 models: Mamba-2 and attention layers, each with a dense MLP and perhaps experts."""

import math
from collections.abc import Iterator

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`, published or written by transformers; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 4096, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    head_dim = hf.integer("head_dim", minimum=1) if hf.has("head_dim") else hidden_size // attention_heads
    mamba_heads = hf.integer("mamba_n_heads", 128, minimum=1)
    inner = hf.integer("mamba_expand", 2, minimum=1) * hidden_size
    return HybridConfig(
        model_type="granitemoehybrid",
        vocab_size=hf.integer("vocab_size", 32000, minimum=1),
        hidden_size=hidden_size,
        layer_types=_layer_types(hf),
        num_attention_heads=attention_heads,
        num_key_value_heads=(
            hf.integer("num_key_value_heads", minimum=1) if hf.has("num_key_value_heads") else attention_heads
        ),
        head_dim=head_dim,
        attention_scale=hf.number("attention_multiplier", 1.0),
        attention_bias=hf.flag("attention_bias", False),
        **(rotary(hf, head_dim, max_length=2048) if _rotates(hf) else {}),
        recurrent=Mamba2Config(
            heads=mamba_heads,
            head_dim=pieces.mamba_head_dim(hf, inner, mamba_heads, "mamba_expand * hidden_size"),
            state=hf.integer("mamba_d_state", 256, minimum=1),
            groups=hf.integer("mamba_n_groups", 1, minimum=1),
            conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
            conv_bias=hf.flag("mamba_conv_bias", True),
            proj_bias=hf.flag("mamba_proj_bias", False),
            out_bias=hf.flag("mamba_proj_bias", False),
            chunk_size=hf.integer("mamba_chunk_size", 256, minimum=1),
            time_step_limit=hf.limits("time_step_limit", (0.0, math.inf)),
        ),
        shared_intermediate_size=hf.integer("shared_intermediate_size", 1024, minimum=1),
        num_experts=hf.integer("num_local_experts", 8, minimum=0),
        experts_per_token=hf.integer("num_experts_per_tok", 2, minimum=0),
        expert_intermediate_size=hf.integer("intermediate_size", 11008, minimum=1),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        residual_multiplier=hf.number("residual_multiplier", 1.0),
        logits_divisor=hf.number("logits_scaling", 1.0, positive=True),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a granitemoehybrid checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        if kind == "attention":
            yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
        else:
            yield from pieces.mamba(f"{stored}.mamba", f"{ours}.mixer", config)
        yield Weight(f"{stored}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight")
        for projection in ("input_linear", "output_linear"):
            yield from pieces.linear(f"{stored}.shared_mlp.{projection}", f"{ours}.shared_mlp.{projection}")
        if config.num_experts:
            yield from pieces.linear(f"{stored}.block_sparse_moe.router", f"{ours}.moe.router")
            for projection in ("gate_up_proj", "down_proj"):
                name = f"{stored}.block_sparse_moe.experts.{projection}"
                yield Weight(name, f"{ours}.moe.{projection}", Layout.SWAPPED)
    yield Weight("model.norm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    if not hf.has("layer_types"):
        return ("mamba",) * hf.integer("num_hidden_layers", 32, minimum=1)
    kinds = hf.choices("layer_types", pieces.LAYER_TYPES)
    if hf.integer("num_hidden_layers", 32, minimum=1) != len(kinds):
        raise hf.refusal("num_hidden_layers", f"{len(kinds)}, the number of layer_types")
    return tuple(pieces.LAYER_TYPES[kind] for kind in kinds)


def _rotates(hf: HFConfig) -> bool:
    return hf.choice("position_embedding_type", None, [None, "nope", "rope"]) == "rope"


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(("layers_block_type", "layer_types"),),
    only={"hidden_act": keys.SILU},
    renames=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
)
