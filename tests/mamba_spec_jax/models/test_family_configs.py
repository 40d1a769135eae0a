"""Reading the families' configurations in their spellings, what each refuses, and what real ones come to."""

import dataclasses
import math
import operator

import pytest
from flax import nnx

from mamba_spec_jax.models.config import BranchMultipliers, SharedBlocks
from mamba_spec_jax.models.families import FAMILIES, config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy
from tests.golden.family_cases import FAMILY_CASES

INFINITE = {"__float__": "Infinity"}
SHARED = {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "mamba"]}
TWICE = {"num_hidden_layers": 3, "layers_block_type": ["hybrid", "mamba", "hybrid"]}

SPELLINGS = [
    ("mamba2", {}, "layer_types", ("mamba",) * 64),
    ("mamba2", {}, "attention_layers", ()),
    ("mamba2", {}, "residual_in_fp32", True),
    ("mamba2", {"time_step_limit": [0, INFINITE]}, "recurrent.time_step_limit", (0.0, math.inf)),
    ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}, "layer_types", ("mamba", "attention", "mamba")),
    ("bamba", {"attn_layer_indices": None}, "attention_layers", ()),
    ("bamba", {}, "rotary_dim", 64),
    ("bamba", {"partial_rotary_factor": 0.25}, "rotary_dim", 64),  # transformers reads it in rope_parameters only
    ("lfm2", {}, "rope_theta", 1e6),
    ("bamba", {"rope_theta": 500, "partial_rotary_factor": 0.5}, "rope_theta", 500.0),
    ("bamba", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_dim", 32),
    ("bamba", {"num_key_value_heads": None}, "num_key_value_heads", 32),
    ("falcon_h1", {"num_hidden_layers": 2}, "layer_types", ("parallel", "parallel")),
    ("falcon_h1", {"num_hidden_layers": 2}, "attention_layers", (0, 1)),
    ("falcon_h1", {"num_hidden_layers": 2}, "recurrent_layers", (0, 1)),
    ("falcon_h1", {}, "recurrent.norm", "none"),
    ("falcon_h1", {"mamba_rms_norm": True}, "recurrent.norm", "before_gate"),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, "recurrent.norm", "gated"),
    ("falcon_h1", {"mamba_d_ssm": None}, "recurrent.head_dim", 64),
    ("falcon_h1", {"mamba_d_ssm": 2048, "mamba_d_head": 16}, "recurrent.head_dim", 16),
    ("falcon_h1", {"head_dim": 64, "key_multiplier": 0.5}, "attention_scale", 0.0625),
    ("falcon_h1", {"lm_head_multiplier": 0.0625}, "logits_divisor", 16.0),
    ("falcon_h1", {"ssm_multipliers": None, "mlp_multipliers": None}, "multipliers", BranchMultipliers()),
    ("falcon_h1", {"rope_theta": 100000000000, "rope_scaling": None}, "rope_theta", 1e11),
    ("nemotron_h", {"hybrid_override_pattern": "ME*-"}, "layer_types", ("mamba", "moe", "attention", "mlp")),
    (
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "full_attention"]},
        "layer_types",
        ("mamba", "attention"),
    ),
    ("nemotron_h", {}, "layer_types", ("mamba", "moe", "attention", "mlp")),
    ("nemotron_h", {"hybrid_override_pattern": "M*"}, "num_experts", 0),
    ("nemotron_h", {}, "rope_theta", None),
    # transformers' full forward clamps by `time_step_min` and does not ask for `time_step_limit`.
    (
        "nemotron_h",
        {"time_step_min": 0.002, "time_step_limit": [0, INFINITE]},
        "recurrent.time_step_limit",
        (0.002, math.inf),
    ),
    ("nemotron_h", {"moe_latent_size": None}, "expert_latent_size", 0),
    ("zamba2", SHARED, "layer_types", ("shared", "mamba")),
    ("zamba2", {}, "attention_layers", (6, 12, 18, 24, 30, 36, 42, 47, 51)),
    ("zamba2", {}, "recurrent_layers", tuple(range(54))),
    ("zamba2", SHARED | {"num_mem_blocks": 2}, "shared_blocks", SharedBlocks(1, 128)),  # the other one has no layer
    ("zamba2", TWICE | {"num_mem_blocks": 1}, "shared_blocks", SharedBlocks(1, 128)),
    ("zamba2", TWICE | {"num_mem_blocks": 2}, "shared_blocks", SharedBlocks(2, 128)),
    ("zamba2", TWICE | {"num_mem_blocks": 5}, "shared_blocks", SharedBlocks(2, 128)),
    ("zamba2", {"num_hidden_layers": 1, "layers_block_type": ["mamba"]}, "shared_blocks", None),
    ("zamba2", {}, "attention_scale", 80**-0.5),
    ("zamba2", {"rope_theta": 7.0}, "rope_theta", None),
    ("zamba2", {"rope_theta": 7.0, "use_mem_rope": True}, "rope_theta", 7.0),
    ("zamba2", {"rms_norm_eps": 1e-3}, "recurrent.norm_eps", 1e-5),
    ("zamba2", {"intermediate_size": None}, "shared_intermediate_size", 10240),
    ("qwen3_next", {"num_hidden_layers": 4}, "layer_types", ("gated_delta",) * 3 + ("attention",)),
    ("qwen3_next", {"num_hidden_layers": 4, "full_attention_interval": 2}, "attention_layers", (1, 3)),
    ("qwen3_next", {"rope_theta": 10000000, "rope_scaling": None}, "rope_theta", 1e7),
    ("qwen3_next", {"rope_theta": 10000000, "partial_rotary_factor": 0.5}, "rotary_dim", 128),
    ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 0.125}}, "rotary_dim", 32),
    ("qwen3_next", {"num_hidden_layers": 5, "decoder_sparse_step": 2}, "dense_layers", (0, 2, 4)),
    ("qwen3_next", {"mlp_only_layers": [2, 7]}, "dense_layers", (2, 7)),
    ("qwen3_5", {"text_config": {"num_hidden_layers": 8}}, "attention_layers", (3, 7)),
    ("qwen3_5", {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}, "tie_embeddings", True),
    (
        "qwen3_5",
        {"text_config": {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [1, 1, 1]}}},
        "rope_theta",
        1e7,
    ),
    ("qwen3_5_text", {"intermediate_size": 7}, "shared_intermediate_size", 7),
    ("qwen3_5_moe", {"text_config": {"num_experts": 3}}, "num_experts", 3),
    ("olmo_hybrid", {}, "rope_theta", 10000.0),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}, "rope_theta", None),
    ("olmo_hybrid", {"rope_theta": None, "rope_scaling": None}, "rope_theta", None),
    ("olmo_hybrid", {"num_hidden_layers": 3}, "attention_layers", (2,)),
    ("olmo_hybrid", {}, "recurrent.state", 96),
    ("olmo_hybrid", {"linear_key_head_dim": 5}, "recurrent.head_dim", 10),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False}, "recurrent.beta_scale", 1.0),
    ("lfm2", {"num_hidden_layers": 3, "full_attn_idxs": [1]}, "layer_types", ("short_conv", "attention", "short_conv")),
    ("lfm2", {}, "recurrent_layers", ()),
    ("lfm2", {"block_ff_dim": 10240}, "shared_intermediate_size", 6912),
    ("lfm2", {"block_ff_dim": 3001, "block_ffn_dim_multiplier": None}, "shared_intermediate_size", 2000),
    ("lfm2", {"tie_embedding": False}, "tie_embeddings", False),
    ("jamba", {"num_hidden_layers": 14}, "attention_layers", (4, 12)),
    ("jamba", {"num_hidden_layers": 4}, "dense_layers", (0, 2)),
    ("jamba", {"num_experts": 1}, "num_experts", 0),
    ("jamba", {"hidden_size": 100, "num_attention_heads": 4, "num_key_value_heads": 4}, "recurrent.rank", 7),
    ("jamba", {"mamba_dt_rank": 9}, "recurrent.rank", 9),
    ("kimi_linear", {"num_hidden_layers": 6}, "attention_layers", (4,)),
    (
        "kimi_linear",
        {"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}},
        "attention_layers",
        (1,),
    ),
    ("kimi_linear", {"linear_attn_config": {"num_heads": 7, "head_dim": 5}}, "recurrent.inner", 35),
    ("kimi_linear", {"first_k_dense_replace": 2}, "dense_layers", (0, 1)),
    ("kimi_linear", {"q_lora_rank": 9}, "latent.query_rank", 9),
    ("kimi_linear", {"norm_topk_prob": False}, "sigmoid_routing.normalized", False),
    ("kimi_linear", {"norm_topk_prob": False, "moe_renormalize": True}, "sigmoid_routing.normalized", True),
    ("kimi_linear", {"n_group": 2}, "sigmoid_routing.groups", 2),
    ("kimi_linear", {"n_group": 2, "num_expert_group": 4}, "sigmoid_routing.groups", 4),
    ("kimi_linear", {"num_local_experts": 3, "num_experts": 5}, "num_experts", 5),
    ("kimi_linear", {"num_experts_per_tok": 3}, "experts_per_token", 3),
    ("kimi_linear", {"n_shared_experts": 2}, "shared_intermediate_size", 2048),
    ("nemotron_h", {"time_step_min": 0.002, "mamba_dt_min": 0.3}, "recurrent.time_step_limit", (0.3, math.inf)),
    ("nemotron_h", {"n_groups": 4, "mamba_n_groups": 2}, "recurrent.groups", 2),
    ("nemotron_h", {"conv_kernel": 4, "mamba_d_conv": 3}, "recurrent.conv_width", 3),
    ("nemotron_h", {"use_conv_bias": True, "mamba_conv_bias": False}, "recurrent.conv_bias", False),
    ("nemotron_h", {"n_routed_experts": 4, "num_local_experts": 6}, "num_experts", 6),
    ("nemotron_h", {"layers_block_type": ["moe"], "layer_types": ["mamba", "mlp"]}, "layer_types", ("mamba", "mlp")),
    ("jamba", {"num_experts": 4, "num_local_experts": 6}, "num_experts", 6),
    ("granitemoehybrid", {"num_hidden_layers": 1, "layers_block_type": ["attention"]}, "layer_types", ("attention",)),
    ("qwen3_next", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}, "attention_layers", (1,)),
    ("mamba2", {"hidden_act": "swish"}, "num_experts", 0),
    ("nemotron_h", {"mlp_hidden_act": "swish"}, "mlp_activation", "silu"),
]


@pytest.mark.parametrize(("family", "values", "field", "expected"), SPELLINGS)
def test_spellings(family, values, field, expected):
    assert operator.attrgetter(field)(config_from_hf({"model_type": family} | values)) == expected


# What transformers 5.24 ignores is no reason to refuse: the model is the one without the key.
IGNORED = [
    ("bamba", {"partial_rotary_factor": 1.0}),
    ("falcon_h1", {"mamba_use_mlp": False}),
    ("kimi_linear", {"mla_use_nope": False, "moe_layer_freq": 2, "moe_router_activation_func": "softmax"}),
    ("kimi_linear", {"tie_word_embeddings": True}),
    ("nemotron_h", {"num_hidden_layers": 3, "sliding_window": 512, "n_shared_experts": 2}),
    ("mamba2", {"is_causal": False}),
    ("nemotron_h", {"attention_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    ("zamba2", {"use_conv_bias": False, "use_long_context": True}),
]


@pytest.mark.parametrize(("family", "values"), IGNORED)
def test_what_transformers_ignores_is_not_refused(family, values):
    assert config_from_hf({"model_type": family} | values) == config_from_hf({"model_type": family})


REFUSALS = [
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    ("mamba2", {"num_heads": 64}, r"num_heads is 64, expected expand \* hidden_size / head_dim = 8192 / 64"),
    ("mamba2", {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of at least 1"),
    ("mamba2", {"time_step_limit": [0.2, 0.1]}, "time_step_limit is .*, expected two numbers in ascending order"),
    ("bamba", {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
    ("bamba", {"attn_layer_indices": [32]}, r"attn_layer_indices is \[32\], expected a list of layers among 0\.\.31"),
    ("bamba", {"attn_layer_indices": 3}, r"attn_layer_indices is 3, expected a list of layers"),
    ("bamba", {"head_dim": 6}, "rotary_dim is 3, expected an even number up to head_dim=6"),
    ("bamba", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor is missing"),
    ("bamba", {"mamba_d_head": 32}, r"mamba_d_head is 32, expected 64: mamba_expand \* hidden_size / mamba_n_heads"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    ("falcon_h1", {"ssm_multipliers": [1, 1]}, r"ssm_multipliers is \[1, 1\], expected 5 finite numbers"),
    ("falcon_h1", {"mlp_multipliers": [1, math.nan]}, r"mlp_multipliers is \[1, nan\], expected 2 finite numbers"),
    ("falcon_h1", {"lm_head_multiplier": 0}, "lm_head_multiplier is 0, expected a positive finite number"),
    ("falcon_h1", {"mamba_d_ssm": 1000}, "mamba_n_heads is None, expected a divisor of mamba_d_ssm = 1000"),
    ("falcon_h1", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ("nemotron_h", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act is 'tanh', expected one of silu, gelu, relu2"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu', expected one of silu"),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX', expected a string of M, E"),
    ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type is .*, expected a list of mamba"),
    ("nemotron_h", {"n_group": 2, "topk_group": 3}, r"has top_groups=3, expected 1\.\.2 \(groups\)"),
    ("zamba2", {"hidden_act": "silu"}, "hidden_act is 'silu', expected one of gelu"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings is False, expected one of True"),
    (
        "zamba2",
        {"use_shared_attention_adapter": True, "num_key_value_heads": 8},
        "num_key_value_heads is 8, expected 32, all the heads, with use_shared_attention_adapter",
    ),
    ("zamba2", {"num_attention_heads": 3}, r"num_attention_heads is 3, expected a divisor of 2 \* hidden_size = 5120"),
    ("zamba2", {"num_hidden_layers": 3}, "num_hidden_layers is 3, expected 54 where there are no layers_block_type"),
    (
        "zamba2",
        SHARED | {"num_hidden_layers": 3},
        "num_hidden_layers is 3, expected 2, the number of layers_block_type",
    ),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    (
        "qwen3_next",
        {"layer_types": ["conv"]},
        "layer_types is .*, expected a list of linear_attention, full_attention",
    ),
    (
        "qwen3_next",
        {"layer_types": ["full_attention"], "num_hidden_layers": 2},
        "num_hidden_layers is 2, expected 1, the number of layer_types",
    ),
    ("qwen3_next", {"num_experts": 0}, "num_experts is 0, expected an integer of at least 1"),
    ("qwen3_next", {"linear_num_value_heads": 24}, "heads is 24, expected a multiple of key_heads = 16"),
    ("qwen3_5", {"text_config": {"hidden_act": "relu"}}, "text_config: hidden_act is 'relu', expected one of silu"),
    ("qwen3_5", {"rope_parameters": {"rope_type": "su"}}, "rope_type is 'su', expected one of default"),
    ("olmo_hybrid", {"num_attention_heads": 7}, "num_attention_heads is 7, expected a divisor of hidden_size = 3840"),
    (
        "olmo_hybrid",
        {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2},
        "layer_types is .*, expected a layer of each type at least",
    ),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1, expected an integer of at least 2"),
    ("lfm2", {"layer_types": ["linear_attention"]}, "layer_types is .*, expected a list of conv, full_attention"),
    ("jamba", {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
    ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset is 8, expected less than attn_layer_period = 8"),
    ("kimi_linear", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*, expected a type for each of the 27 layers"),
    (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
        r"kda_layers is \[1\], expected the layers 1\.\.27 that full_attn_layers leaves",
    ),
    ("zamba2", SHARED | {"hybrid_layer_ids": [1]}, r"hybrid_layer_ids is \[1\], expected one of \[0\]"),
    ("zamba2", {"head_dim": 7}, "head_dim is 7, expected one of 160"),
    ("zamba2", {"mamba_headdim": 7}, r"mamba_headdim is 7, expected 640: mamba_expand \* hidden_size / n_mamba_heads"),
    ("kimi_linear", {"num_key_value_heads": 8}, "num_key_value_heads is 8, expected null or 32"),
    ("bamba", {"layer_types": ["mamba"]}, r"layer_types is \['mamba'\], expected one of null"),
    ("jamba", {"is_causal": False}, "is_causal is False, expected one of True"),
    ("nemotron_h", {"mamba_dt_min": "x"}, "mamba_dt_min is 'x', expected a positive finite number"),
    ("zamba2", {"n_mamba_heads": 7}, r"n_mamba_heads is 7, expected a divisor of mamba_expand \* hidden_size = 5120"),
]


@pytest.mark.parametrize(("family", "values", "message"), REFUSALS)
def test_refusals_name_the_key(family, values, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": family} | values)


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: f"{case.family}/{case.name}")
def test_every_parameter_has_one_weight(case):
    model = HybridModel.create(config_from_hf({"model_type": case.family} | case.config))
    parameters = sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(model.abstract_params()))
    weights = list(FAMILIES[case.family].weights(model.config))
    assert sorted(weight.path for weight in weights if weight.copy_of is None) == parameters
    assert len({weight.name for weight in weights}) == len(weights)


# Depth, heads x dim x state, groups and width of the convolution of released models, and what their states come to, in
# MiB of float32 a request and channels of the convolution. Nemotron 3 as public code that loads the checkpoints states
# them, Falcon-H1 as in the table of transformers' documentation.
STATES = {
    "Nemotron-3-Nano-30B": (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "mamba_num_heads": 64,
        },
        (23, 46, 6144),
    ),
    "Nemotron-3-Super-120B": ({"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 40}, (40, 160, 10240)),
    "Falcon-H1-34B": (
        {
            "model_type": "falcon_h1",
            "hidden_size": 5120,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_ssm": 4096,
            "mamba_n_heads": 32,
            "mamba_n_groups": 2,
        },
        (72, 288, 5120),
    ),
    "Qwen3-Next-80B": ({"model_type": "qwen3_next"}, (36, 72, 8192)),
    "Qwen3.5-35B": ({"model_type": "qwen3_5_moe"}, (30, 60, 8192)),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_released_models(name):
    values, (layers, mebibytes, channels) = STATES[name]
    spec = config_from_hf(values).pool_spec(DTypePolicy.bfloat16())
    assert (spec.recurrent_layers, spec.ssm_bytes(), spec.conv_channels) == (layers, mebibytes * 2**20, channels)


def test_layers_and_their_recurrence_must_agree():
    config = config_from_hf({"model_type": "qwen3_next", "num_hidden_layers": 4})
    with pytest.raises(ValueError, match="recurrent is a GatedDeltaConfig, expected a Mamba2Config for layers of type"):
        dataclasses.replace(config, layer_types=("mamba",))


def test_a_convolution_without_a_recurrence_keeps_windows_alone():
    config = config_from_hf({"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [1]})
    for strategy in (CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY):
        spec = config.pool_spec(DTypePolicy(), config.recurrent.backend(strategy=strategy))
        assert (spec.ssm_bytes(), spec.ring, spec.conv_bytes()) == (0, None, 4 * 2 * 2560)


def test_latent_attention_keeps_one_key_for_all_heads():
    spec = config_from_hf({"model_type": "kimi_linear"}).pool_spec(DTypePolicy())
    assert (spec.attention_layers, spec.kv_heads, spec.kv_head_dim) == (6, 1, 576)
