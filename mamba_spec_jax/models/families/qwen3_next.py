"""qwen3_next: gated delta rule and gated attention layers, each with routed experts and a gated shared expert."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Prediction, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    layers = hf.integer("num_hidden_layers", 48, minimum=1)
    head_dim = hf.integer("head_dim", 256, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 16, minimum=1)
    return HybridConfig(
        model_type="qwen3_next",
        vocab_size=hf.integer("vocab_size", 151936, minimum=1),
        hidden_size=hf.integer("hidden_size", 2048, minimum=1),
        layer_types=pieces.periodic_layer_types(hf, layers, hf.integer("full_attention_interval", 4, minimum=1)),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 2, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias", False),
        attention_gated=True,
        attention_norm="head",
        **rotary(hf, head_dim, max_length=32768, fraction=hf.number("partial_rotary_factor", 0.25, positive=True)),
        recurrent=pieces.gated_delta_config(hf),
        shared_intermediate_size=hf.integer("shared_expert_intermediate_size", 512, minimum=1),
        shared_gated=True,
        dense_layers=_dense_layers(hf, layers),
        mlp_intermediate_size=hf.integer("intermediate_size", 5632, minimum=1),
        num_experts=hf.integer("num_experts", 512, minimum=1),
        experts_per_token=hf.integer("num_experts_per_tok", 10, minimum=1),
        expert_intermediate_size=hf.integer("moe_intermediate_size", 512, minimum=1),
        softmax_over_chosen=hf.flag("norm_topk_prob", True),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        zero_centered_norms=True,
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", None),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a qwen3_next checkpoint."""
    yield from layered_weights(config, _in_proj)


def layered_weights(config: HybridConfig, in_proj: Callable[[str, str, HybridConfig], Weight]) -> Iterator[Weight]:
    """The weights of this family and its successors, which differ in `in_proj(stored, ours, config)`."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        if kind == "gated_delta":
            yield in_proj(f"{stored}.linear_attn", f"{ours}.mixer", config)
            yield from pieces.gated_delta(f"{stored}.linear_attn", f"{ours}.mixer", config)
        yield from _rest_of_layer(stored, ours, config, i)
    yield Weight("model.norm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def prediction_config(hf: HFConfig, target: HybridConfig) -> HybridConfig:
    """The head is an attention layer like the target's, with experts if the target has any."""
    return dataclasses.replace(target, layer_types=("attention",), dense_layers=())


def prediction_weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of the head for multi-token prediction."""
    yield Weight("mtp.pre_fc_norm_embedding.weight", "embedding_norm.weight")
    yield Weight("mtp.pre_fc_norm_hidden.weight", "hidden_norm.weight")
    yield from pieces.linear("mtp.fc", "fc")
    yield from _rest_of_layer("mtp.layers.0", "layers.0", config, 0)
    yield Weight("mtp.norm.weight", "norm.weight")


def _rest_of_layer(stored: str, ours: str, config: HybridConfig, layer_id: int) -> Iterator[Weight]:
    """Norms, feed-forward part, and attention if the layer attends."""
    yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
    if config.layer_types[layer_id] == "attention":
        yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
    yield Weight(f"{stored}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight")
    if config.has_experts(layer_id):
        yield from pieces.linear(f"{stored}.mlp.gate", f"{ours}.moe.router")
        yield from pieces.experts(f"{stored}.mlp.experts", f"{ours}.moe", config)
        yield from pieces.gated_mlp(f"{stored}.mlp.shared_expert", f"{ours}.shared_mlp", config)
        yield from pieces.linear(f"{stored}.mlp.shared_expert_gate", f"{ours}.shared_gate")
    else:
        yield from pieces.gated_mlp(f"{stored}.mlp", f"{ours}.shared_mlp", config)


def _in_proj(stored: str, ours: str, config: HybridConfig) -> Weight:
    """Two matrices, which have the rows of one key head after another, and of each those of its value heads."""
    delta = cast(GatedDeltaConfig, config.recurrent)
    shared = delta.heads // delta.key_heads
    values = shared * delta.head_dim
    qkvz = _by_part(delta.key_heads, (delta.state, delta.state, values, values))
    ba = _by_part(delta.key_heads, (shared, shared))
    return Weight(
        f"{stored}.in_proj.weight",
        f"{ours}.in_proj.kernel",
        Layout.SWAPPED,
        parts=(f"{stored}.in_proj_qkvz.weight", f"{stored}.in_proj_ba.weight"),
        part_rows=(len(qkvz), len(ba)),
        row_order=(*qkvz, *(len(qkvz) + row for row in ba)),
    )


def _by_part(groups: int, widths: tuple[int, ...]) -> list[int]:
    """Rows that come group by group, of each group `widths` rows of every part, in the order of the parts."""
    rows = np.arange(groups * sum(widths)).reshape(groups, -1)
    parts = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts]).tolist()


def _dense_layers(hf: HFConfig, layers: int) -> tuple[int, ...]:
    alone = hf.token_ids("mlp_only_layers", None)
    step = hf.integer("decoder_sparse_step", 1, minimum=1)
    return tuple(i for i in range(layers) if i in alone or (i + 1) % step)


PREDICTION = Prediction(config=prediction_config, weights=prediction_weights)
FAMILY = Family(
    read_config=read_config,
    weights=weights,
    only={"hidden_act": keys.SILU},
    unused=("mtp.",),
    prediction=PREDICTION,
)
