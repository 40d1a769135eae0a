"""nemotron_h, the Nemotron-H and Nemotron 3 models: every layer is one of Mamba-2, attention, MLP or experts."""

import dataclasses
import math
from collections.abc import Iterator

from mamba_spec_jax.layers.mlp import ACTIVATIONS
from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Prediction, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config

_LAYER_TYPES = pieces.LAYER_TYPES | {"mlp": "mlp", "moe": "moe"}
_PATTERN = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_DEFAULT_LAYERS = ("mamba", "moe", "attention", "mlp")


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults.

    The time step is clamped as in transformers' full forward, to `time_step_min` and more, whatever `time_step_limit`
    says; its one-token step does not clamp at all.
    """
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    head_dim = hf.integer("head_dim", 128, minimum=1)
    layer_types = _layer_types(hf)
    experts = hf.integer("n_routed_experts", 8, minimum=1) if "moe" in layer_types else 0
    activation = hf.choice("mlp_hidden_act", "relu2", (*ACTIVATIONS, *keys.SILU[1:]))
    bias = hf.flag("use_bias", False)
    return HybridConfig(
        model_type="nemotron_h",
        vocab_size=hf.integer("vocab_size", 131072, minimum=1),
        hidden_size=hf.integer("hidden_size", 4096, minimum=1),
        layer_types=layer_types,
        separate_feed_forward=True,
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 8, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        recurrent=Mamba2Config(
            heads=hf.integer("mamba_num_heads", 128, minimum=1),
            head_dim=hf.integer("mamba_head_dim", 64, minimum=1),
            state=hf.integer("ssm_state_size", 128, minimum=1),
            groups=hf.integer("n_groups", 8, minimum=1),
            conv_width=hf.integer("conv_kernel", 4, minimum=2),
            conv_bias=hf.flag("use_conv_bias", True),
            proj_bias=bias,
            out_bias=bias,
            chunk_size=hf.integer("chunk_size", 128, minimum=1),
            time_step_limit=(hf.number("time_step_min", 0.001, positive=True), math.inf),
        ),
        shared_intermediate_size=hf.integer("moe_shared_expert_intermediate_size", 7688, minimum=1) if experts else 0,
        mlp_intermediate_size=hf.integer("intermediate_size", 21504, minimum=1) if "mlp" in layer_types else 0,
        mlp_activation="silu" if activation in keys.SILU else activation,
        mlp_gated=False,
        mlp_bias=hf.flag("mlp_bias", False),
        num_experts=experts,
        experts_per_token=hf.integer("num_experts_per_tok", 2, minimum=1),
        expert_intermediate_size=hf.integer("moe_intermediate_size", 7688, minimum=1),
        expert_latent_size=hf.integer("moe_latent_size", minimum=1) if hf.has("moe_latent_size") else 0,
        sigmoid_routing=SigmoidRouting(
            groups=hf.integer("n_group", 1, minimum=1),
            top_groups=hf.integer("topk_group", 1, minimum=1),
            normalized=hf.flag("norm_topk_prob", True),
            scale=hf.number("routed_scaling_factor", 1.0),
        ),
        norm_eps=hf.number("layer_norm_epsilon", 1e-5, positive=True),
        residual_in_fp32=hf.flag("residual_in_fp32", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a nemotron_h checkpoint."""
    yield Weight("model.embeddings.weight", "embed_tokens.embedding")
    yield from _layers("model.layers", config)
    yield Weight("model.norm_f.weight", "norm.weight")
    yield from pieces.output_head("model.embeddings.weight", config)


def prediction_config(hf: HFConfig, target: HybridConfig) -> HybridConfig:
    """The head is an attention layer and one of experts, unless the file says otherwise."""
    key = "mtp_layers_block_type" if hf.has("mtp_layers_block_type") else "mtp_hybrid_override_pattern"
    layer_types = _layers_of(hf, key) if hf.has(key) else ("attention", "moe")
    if "mamba" in layer_types or layer_types.count("attention") != 1:
        raise hf.refusal(key, "one attention layer, and no Mamba-2 layers: that is what a head can be here")
    return dataclasses.replace(target, layer_types=layer_types)


def prediction_weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of the head for multi-token prediction."""
    yield Weight("mtp.layers.0.enorm.weight", "embedding_norm.weight")
    yield Weight("mtp.layers.0.hnorm.weight", "hidden_norm.weight")
    yield from pieces.linear("mtp.layers.0.eh_proj", "fc")
    yield from _layers("mtp.layers", config)
    yield Weight(f"mtp.layers.{len(config.layer_types) - 1}.final_layernorm.weight", "norm.weight")


def _layers(prefix: str, config: HybridConfig) -> Iterator[Weight]:
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"{prefix}.{i}", f"layers.{i}"
        norm = "input_norm" if kind in ("mamba", "attention") else "mlp_norm"
        yield Weight(f"{stored}.norm.weight", f"{ours}.{norm}.weight")
        stored = f"{stored}.mixer"
        if kind == "mamba":
            yield from pieces.mamba(stored, f"{ours}.mixer", config)
        elif kind == "attention":
            yield from pieces.attention(stored, f"{ours}.mixer", config)
        elif kind == "mlp":
            yield from _mlp(stored, f"{ours}.shared_mlp", config)
        else:
            yield from _mlp(f"{stored}.shared_experts", f"{ours}.shared_mlp", config)
            yield from _experts(stored, f"{ours}.moe", config)


def _mlp(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    for name in ("up_proj", "down_proj"):
        yield from pieces.linear(f"{stored}.{name}", f"{ours}.{name}", config.mlp_bias)


def _experts(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    yield from pieces.linear(f"{stored}.gate", f"{ours}.router")
    yield Weight(f"{stored}.gate.e_score_correction_bias", f"{ours}.router.correction")
    for name in ("up_proj", "down_proj"):
        apart = tuple(f"{stored}.experts.{expert}.{name}.weight" for expert in range(config.num_experts))
        yield Weight(f"{stored}.experts.{name}", f"{ours}.{name}", Layout.SWAPPED, parts=apart)
    if config.expert_latent_size:
        for number, name in ((1, "latent_in"), (2, "latent_out")):
            yield from pieces.linear(f"{stored}.fc{number}_latent_proj", f"{ours}.{name}", config.mlp_bias)


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    key = "layers_block_type" if hf.has("layers_block_type") else "hybrid_override_pattern"
    return _layers_of(hf, key) if hf.has(key) else _DEFAULT_LAYERS


def _layers_of(hf: HFConfig, key: str) -> tuple[str, ...]:
    """The layers that a list of types or a pattern of letters names."""
    if not key.endswith("pattern"):
        return tuple(_LAYER_TYPES[kind] for kind in hf.choices(key, _LAYER_TYPES))
    pattern = hf.values[key]
    if not isinstance(pattern, str) or not set(pattern) <= set(_PATTERN):
        raise hf.refusal(key, f"a string of {', '.join(_PATTERN)}")
    return tuple(_PATTERN[letter] for letter in pattern)


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(
        ("layer_types", "layers_block_type"),
        ("mamba_chunk_size", "chunk_size"),
        ("mamba_conv_bias", "use_conv_bias"),
        ("mamba_d_conv", "conv_kernel"),
        ("mamba_dt_min", "time_step_min"),
        ("mamba_n_groups", "n_groups"),
        ("num_local_experts", "n_routed_experts"),
    ),
    # Biases of attention, a tied output projection, more than one shared expert, a window: transformers 5.24 computes
    # none of them, whatever the file says. The list of layers says how many there are. `mtp_*` describe the head for
    # multi-token prediction.
    without_effect=keys.UNROTATED
    | {
        "attention_bias",
        "expand",
        "hidden_dropout",
        "mamba_dt_init_floor",
        "mamba_dt_limit",
        "mamba_dt_max",
        "mamba_expand",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "max_position_embeddings",
        "moe_shared_expert_overlap",
        "mtp_hybrid_override_pattern",
        "mtp_layers_block_type",
        "n_shared_experts",
        "num_hidden_layers",
        "num_logits_to_keep",
        "num_nextn_predict_layers",
        "rescale_prenorm_residual",
        "sliding_window",
        "tie_word_embeddings",
        "time_step_floor",
        "time_step_limit",
        "time_step_max",
        "use_mamba_kernels",
    },
    only={"mamba_hidden_act": keys.SILU},
    renames=(("backbone.", "model."), ("model.embedding.", "model.embeddings.")),
    unused=("mtp.",),
    prediction=Prediction(config=prediction_config, weights=prediction_weights),
)
