"""lfm2: short-convolution layers and attention layers with normed queries and keys."""

from collections.abc import Iterator
from typing import cast

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import ShortConvConfig

_LAYER_TYPES = {"conv": "short_conv", "full_attention": "attention", "attention": "attention"}


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 2560, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    head_dim = hf.integer("head_dim", minimum=1) if hf.has("head_dim") else hidden_size // attention_heads
    return HybridConfig(
        model_type="lfm2",
        vocab_size=hf.integer("vocab_size", 65536, minimum=1),
        hidden_size=hidden_size,
        layer_types=_layer_types(hf),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 8, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_norm="head",
        **rotary(hf, head_dim, max_length=128000, theta=1_000_000.0),
        recurrent=ShortConvConfig(
            channels=hidden_size,
            conv_width=hf.integer("conv_L_cache", 3, minimum=2),
            bias=hf.flag("conv_bias", False),
        ),
        shared_intermediate_size=_intermediate_size(hf),
        norm_eps=hf.number("norm_eps", 1e-5, positive=True),
        tie_embeddings=hf.flag("tie_word_embeddings", True),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of an lfm2 checkpoint."""
    bias = cast(ShortConvConfig, config.recurrent).bias
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.operator_norm.weight", f"{ours}.input_norm.weight")
        if kind == "attention":
            yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
        else:
            yield from pieces.linear(f"{stored}.conv.in_proj", f"{ours}.mixer.in_proj", bias)
            yield Weight(f"{stored}.conv.conv.weight", f"{ours}.mixer.conv_weight", Layout.DEPTHWISE)
            if bias:
                yield Weight(f"{stored}.conv.conv.bias", f"{ours}.mixer.conv_bias")
            yield from pieces.linear(f"{stored}.conv.out_proj", f"{ours}.mixer.out_proj", bias)
        yield Weight(f"{stored}.ffn_norm.weight", f"{ours}.mlp_norm.weight")
        yield from pieces.gated_mlp(f"{stored}.feed_forward", f"{ours}.shared_mlp", config, ("w1", "w3", "w2"))
    yield Weight("model.embedding_norm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    count = hf.integer("num_hidden_layers", 32, minimum=1)
    if hf.has("layer_types"):
        kinds = hf.choices("layer_types", _LAYER_TYPES)
        if len(kinds) != count:
            raise hf.refusal("num_hidden_layers", f"{len(kinds)}, the number of layer_types")
        return tuple(_LAYER_TYPES[kind] for kind in kinds)
    attends = hf.token_ids("full_attn_idxs", None) if hf.has("full_attn_idxs") else range(count)
    return tuple("attention" if i in attends else "short_conv" for i in range(count))


def _intermediate_size(hf: HFConfig) -> int:
    """The width of the feed-forward part, which the file may state as that of a part without a gate."""
    width = hf.integer("intermediate_size", 12288, minimum=1)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" in hf.values and not hf.has("block_ffn_dim_multiplier"):
        return width
    width = int(hf.number("block_ffn_dim_multiplier", 1.0, positive=True) * width)
    multiple = hf.integer("block_multiple_of", 256, minimum=1)
    return -(-width // multiple) * multiple


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(("tie_embedding", "tie_word_embeddings"), ("block_ff_dim", "intermediate_size")),
    renames=(
        ("self_attn.out_proj.", "self_attn.o_proj."),
        ("self_attn.q_layernorm.", "self_attn.q_norm."),
        ("self_attn.k_layernorm.", "self_attn.k_norm."),
    ),
)
