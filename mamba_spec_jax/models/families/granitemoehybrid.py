"""granitemoehybrid, the Granite 4.0 models: Mamba-2 and attention layers, each with a dense MLP and perhaps experts."""

import math
from collections.abc import Iterator

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.hf_config import HFConfig

_LAYER_TYPES = {
    "mamba": "mamba",
    "attention": "attention",
    "linear_attention": "mamba",
    "full_attention": "attention",
}


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`, published or written by transformers; absent keys have transformers' defaults."""
    hf.choice("hidden_act", "silu", ["silu"])
    hidden_size = hf.integer("hidden_size", 4096, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    mamba_heads = hf.integer("mamba_n_heads", 128, minimum=1)
    return HybridConfig(
        model_type="granitemoehybrid",
        vocab_size=hf.integer("vocab_size", 32000, minimum=1),
        hidden_size=hidden_size,
        layer_types=_layer_types(hf),
        num_attention_heads=attention_heads,
        num_key_value_heads=(
            hf.integer("num_key_value_heads", minimum=1) if hf.has("num_key_value_heads") else attention_heads
        ),
        head_dim=hf.integer("head_dim", minimum=1) if hf.has("head_dim") else hidden_size // attention_heads,
        attention_scale=hf.number("attention_multiplier", 1.0),
        attention_bias=hf.flag("attention_bias", False),
        rope_theta=_rope_theta(hf),
        mamba_heads=mamba_heads,
        mamba_head_dim=_mamba_head_dim(hf, hidden_size, mamba_heads),
        mamba_state=hf.integer("mamba_d_state", 256, minimum=1),
        mamba_groups=hf.integer("mamba_n_groups", 1, minimum=1),
        mamba_conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
        mamba_conv_bias=hf.flag("mamba_conv_bias", True),
        mamba_proj_bias=hf.flag("mamba_proj_bias", False),
        mamba_chunk_size=hf.integer("mamba_chunk_size", 256, minimum=1),
        time_step_limit=hf.limits("time_step_limit", (0.0, math.inf)),
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
            for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield from _linear(f"{stored}.self_attn", f"{ours}.mixer", projection, config.attention_bias)
        else:
            yield from _mamba(f"{stored}.mamba", f"{ours}.mixer", config)
        yield Weight(f"{stored}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight")
        for projection in ("input_linear", "output_linear"):
            yield from _linear(f"{stored}.shared_mlp", f"{ours}.shared_mlp", projection)
        if config.num_experts:
            yield from _linear(f"{stored}.block_sparse_moe", f"{ours}.moe", "router")
            for projection in ("gate_up_proj", "down_proj"):
                name = f"{stored}.block_sparse_moe.experts.{projection}"
                yield Weight(name, f"{ours}.moe.{projection}", Layout.SWAPPED)
    yield Weight("model.norm.weight", "norm.weight")
    if config.tie_embeddings:
        yield Weight("lm_head.weight", "embed_tokens.embedding", copy_of="model.embed_tokens.weight")
    else:
        yield Weight("lm_head.weight", "lm_head.kernel", Layout.SWAPPED)


def _mamba(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    for projection in ("in_proj", "out_proj"):
        yield from _linear(stored, ours, projection, config.mamba_proj_bias)
    yield Weight(f"{stored}.conv1d.weight", f"{ours}.conv_weight", Layout.DEPTHWISE)
    if config.mamba_conv_bias:
        yield Weight(f"{stored}.conv1d.bias", f"{ours}.conv_bias")
    for name in ("dt_bias", "A_log", "D", "norm.weight"):
        yield Weight(f"{stored}.{name}", f"{ours}.{name}")


def _linear(stored: str, ours: str, name: str, bias: bool = False) -> Iterator[Weight]:
    yield Weight(f"{stored}.{name}.weight", f"{ours}.{name}.kernel", Layout.SWAPPED)
    if bias:
        yield Weight(f"{stored}.{name}.bias", f"{ours}.{name}.bias")


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    key = "layer_types" if hf.has("layer_types") else "layers_block_type"
    if not hf.has(key):
        return ("mamba",) * hf.integer("num_hidden_layers", 32, minimum=1)
    kinds = hf.choices(key, _LAYER_TYPES)
    if hf.integer("num_hidden_layers", 32, minimum=1) != len(kinds):
        raise hf.refusal("num_hidden_layers", f"{len(kinds)}, the number of {key}")
    return tuple(_LAYER_TYPES[kind] for kind in kinds)


def _mamba_head_dim(hf: HFConfig, hidden_size: int, heads: int) -> int:
    inner = hf.integer("mamba_expand", 2, minimum=1) * hidden_size
    if inner % heads:
        raise hf.refusal("mamba_n_heads", f"a divisor of mamba_expand * hidden_size = {inner}")
    expected = inner // heads
    if hf.values.get("mamba_d_head", "auto") not in ("auto", expected):
        raise hf.refusal("mamba_d_head", f"{expected}: mamba_expand * hidden_size / mamba_n_heads")
    return expected


def _rope_theta(hf: HFConfig) -> float | None:
    if hf.choice("position_embedding_type", None, [None, "nope", "rope"]) != "rope":
        return None
    # `rope_scaling` and a `rope_theta` beside it are what files had before `rope_parameters`.
    rope = hf.nested("rope_scaling" if hf.has("rope_scaling") else "rope_parameters")
    rope.choice("rope_type" if rope.has("rope_type") else "type", "default", ["default"])
    return rope.number("rope_theta", hf.number("rope_theta", 10_000.0, positive=True), positive=True)


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    renames=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
)
