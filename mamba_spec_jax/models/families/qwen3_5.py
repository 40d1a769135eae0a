"""qwen3_5 and qwen3_5_moe: the layers of qwen3_next with projections stored apart; of vision models, the text part."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces, qwen3_next
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    layers = hf.integer("num_hidden_layers", 32, minimum=1)
    dense = {"shared_intermediate_size": hf.integer("intermediate_size", 12288, minimum=1)}
    return _read(hf, "qwen3_5", layers, hf.integer("hidden_size", 4096, minimum=1), 4, dense)


def read_moe_config(hf: HFConfig) -> HybridConfig:
    """The same with experts in every layer."""
    layers = hf.integer("num_hidden_layers", 40, minimum=1)
    experts = {
        "shared_intermediate_size": hf.integer("shared_expert_intermediate_size", 512, minimum=1),
        "shared_gated": True,
        "num_experts": hf.integer("num_experts", 256, minimum=1),
        "experts_per_token": hf.integer("num_experts_per_tok", 8, minimum=1),
        "expert_intermediate_size": hf.integer("moe_intermediate_size", 512, minimum=1),
    }
    return _read(hf, "qwen3_5_moe", layers, hf.integer("hidden_size", 2048, minimum=1), 2, experts)


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of the text part of a checkpoint."""
    yield from qwen3_next.layered_weights(config, _in_proj)


def _read(
    hf: HFConfig, model_type: str, layers: int, hidden_size: int, kv_heads: int, feed_forward: dict[str, Any]
) -> HybridConfig:
    head_dim = hf.integer("head_dim", 256, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 16, minimum=1)
    return HybridConfig(
        model_type=model_type,
        vocab_size=hf.integer("vocab_size", 248320, minimum=1),
        hidden_size=hidden_size,
        layer_types=pieces.periodic_layer_types(hf, layers, hf.integer("full_attention_interval", 4, minimum=1)),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, kv_heads, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias", False),
        attention_gated=True,
        attention_norm="head",
        **rotary(hf, head_dim, max_length=32768, fraction=hf.number("partial_rotary_factor", 0.25, positive=True)),
        recurrent=pieces.gated_delta_config(hf),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        zero_centered_norms=True,
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", None),
        **feed_forward,
    )


def _text(hf: HFConfig) -> HFConfig:
    """The part of the file that describes the language model; a vision model's says by itself whether it ties."""
    if not hf.has("text_config"):
        return hf
    text = hf.nested("text_config")
    outer = {key: hf.values[key] for key in ("tie_word_embeddings",) if hf.has(key)}
    return HFConfig({**text.values, **outer}, text.source)


def _in_proj(stored: str, ours: str, config: HybridConfig) -> Weight:
    delta = cast(GatedDeltaConfig, config.recurrent)
    return Weight(
        f"{stored}.in_proj.weight",
        f"{ours}.in_proj.kernel",
        Layout.SWAPPED,
        parts=tuple(f"{stored}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        part_rows=(delta.conv_channels, delta.inner, delta.heads, delta.heads),
    )


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    text=_text,
    only={"hidden_act": keys.SILU},
    unused=("mtp.", "model.visual."),
    prediction=qwen3_next.PREDICTION,
)
MOE_FAMILY = dataclasses.replace(FAMILY, read_config=read_moe_config)
