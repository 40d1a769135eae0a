"""jamba: Mamba-1 layers and a few attention layers without positions, every other one with experts."""

import math
from collections.abc import Iterator
from typing import cast

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba1Config


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 4096, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    head_dim = hf.integer("head_dim", minimum=1) if hf.has("head_dim") else hidden_size // attention_heads
    layers = hf.integer("num_hidden_layers", 32, minimum=1)
    width = hf.integer("intermediate_size", 14336, minimum=1)
    experts = hf.integer("num_experts", 16, minimum=1)
    routed = _periodic(hf, "expert_layer", 2, 1, layers)
    return HybridConfig(
        model_type="jamba",
        vocab_size=hf.integer("vocab_size", 65536, minimum=1),
        hidden_size=hidden_size,
        layer_types=tuple("attention" if a else "mamba1" for a in _periodic(hf, "attn_layer", 8, 4, layers)),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 8, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        recurrent=Mamba1Config(
            channels=hf.integer("mamba_expand", 2, minimum=1) * hidden_size,
            state=hf.integer("mamba_d_state", 16, minimum=1),
            conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
            rank=_rank(hf, hidden_size),
            conv_bias=hf.flag("mamba_conv_bias", True),
            proj_bias=hf.flag("mamba_proj_bias", False),
        ),
        shared_intermediate_size=width if experts == 1 else 0,  # one expert needs no router
        dense_layers=() if experts == 1 else tuple(i for i in range(layers) if not routed[i]),
        mlp_intermediate_size=width,
        num_experts=0 if experts == 1 else experts,
        experts_per_token=hf.integer("num_experts_per_tok", 2, minimum=1),
        expert_intermediate_size=width,
        softmax_over_chosen=False,
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a jamba checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        if kind == "attention":
            yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
        else:
            yield from _mamba(f"{stored}.mamba", f"{ours}.mixer", config)
        yield Weight(f"{stored}.pre_ff_layernorm.weight", f"{ours}.mlp_norm.weight")
        if config.has_experts(i):
            yield from pieces.linear(f"{stored}.feed_forward.router", f"{ours}.moe.router")
            yield from pieces.experts(f"{stored}.feed_forward.experts", f"{ours}.moe", config)
        else:
            yield from pieces.gated_mlp(f"{stored}.feed_forward", f"{ours}.shared_mlp", config)
    yield Weight("model.final_layernorm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _mamba(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    mamba = cast(Mamba1Config, config.recurrent)
    for name, bias in (
        ("in_proj", mamba.proj_bias),
        ("x_proj", False),
        ("dt_proj", False),
        ("out_proj", mamba.proj_bias),
    ):
        yield from pieces.linear(f"{stored}.{name}", f"{ours}.{name}", bias)
    yield Weight(f"{stored}.dt_proj.bias", f"{ours}.dt_bias")
    yield Weight(f"{stored}.conv1d.weight", f"{ours}.conv_weight", Layout.DEPTHWISE)
    if mamba.conv_bias:
        yield Weight(f"{stored}.conv1d.bias", f"{ours}.conv_bias")
    for name in ("A_log", "D"):
        yield Weight(f"{stored}.{name}", f"{ours}.{name}")
    for part, norm in (("dt", "dt_norm"), ("b", "B_norm"), ("c", "C_norm")):
        yield Weight(f"{stored}.{part}_layernorm.weight", f"{ours}.{norm}.weight")


def _periodic(hf: HFConfig, what: str, period: int, offset: int, layers: int) -> tuple[bool, ...]:
    """Which layers are the `offset`-th of their period."""
    period = hf.integer(f"{what}_period", period, minimum=1)
    offset = hf.integer(f"{what}_offset", offset, minimum=0)
    if offset >= period:
        raise hf.refusal(f"{what}_offset", f"less than {what}_period = {period}")
    return tuple(i % period == offset for i in range(layers))


def _rank(hf: HFConfig, hidden_size: int) -> int:
    if hf.values.get("mamba_dt_rank", "auto") == "auto":
        return math.ceil(hidden_size / 16)
    return hf.integer("mamba_dt_rank", minimum=1)


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(("num_local_experts", "num_experts"),),
    without_effect=keys.UNROTATED
    | {"max_position_embeddings", "use_associative_scan", "use_mamba_kernels", "use_mambapy"},
    # Periods and offsets say which layers are what: transformers refuses lists of them.
    only={
        "hidden_act": keys.SILU,
        "layer_types": (None,),
        "layers_block_type": (None,),
        "layers_num_experts": (None,),
    },
)
