"""Reading the families' configurations in their spellings, what each refuses, and what real ones come to."""

import math
import operator

import pytest
from flax import nnx

from mamba_spec_jax.models.config import BranchMultipliers, SharedBlocks
from mamba_spec_jax.models.families import FAMILIES, config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import DTypePolicy
from tests.golden.family_cases import FAMILY_CASES

INFINITE = {"__float__": "Infinity"}
SHARED = {"num_hidden_layers": 2, "layers_block_type": ["hybrid", "mamba"]}

SPELLINGS = [
    ("mamba2", {}, "layer_types", ("mamba",) * 64),
    ("mamba2", {}, "attention_layers", ()),
    ("mamba2", {}, "residual_in_fp32", True),
    ("mamba2", {"time_step_limit": [0, INFINITE]}, "recurrent.time_step_limit", (0.0, math.inf)),
    ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1]}, "layer_types", ("mamba", "attention", "mamba")),
    ("bamba", {"attn_layer_indices": None}, "attention_layers", ()),
    ("bamba", {}, "rotary_dim", 64),
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
    ("zamba2", SHARED | {"num_mem_blocks": 2}, "shared_blocks", SharedBlocks(2, 128)),
    ("zamba2", {"num_hidden_layers": 1, "layers_block_type": ["mamba"]}, "shared_blocks", None),
    ("zamba2", {}, "attention_scale", 80**-0.5),
    ("zamba2", {"rope_theta": 7.0}, "rope_theta", None),
    ("zamba2", {"rope_theta": 7.0, "use_mem_rope": True}, "rope_theta", 7.0),
    ("zamba2", {"rms_norm_eps": 1e-3}, "recurrent.norm_eps", 1e-5),
    ("zamba2", {"intermediate_size": None}, "shared_intermediate_size", 10240),
]


@pytest.mark.parametrize(("family", "values", "field", "expected"), SPELLINGS)
def test_spellings(family, values, field, expected):
    assert operator.attrgetter(field)(config_from_hf({"model_type": family} | values)) == expected


REFUSALS = [
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    ("mamba2", {"num_heads": 64}, r"num_heads is 64, expected expand \* hidden_size / head_dim = 8192 / 64"),
    ("mamba2", {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of at least 1"),
    ("mamba2", {"time_step_limit": [0.2, 0.1]}, "time_step_limit is .*, expected two numbers in ascending order"),
    ("bamba", {"hidden_act": "relu"}, "hidden_act is 'relu', expected one of silu"),
    ("bamba", {"attn_layer_indices": [32]}, r"attn_layer_indices is \[32\], expected a list of layers among 0\.\.31"),
    ("bamba", {"attn_layer_indices": 3}, r"attn_layer_indices is 3, expected a list of layers"),
    ("bamba", {"partial_rotary_factor": 0.25}, r"partial_rotary_factor is 0\.25, expected one of 0\.5"),
    ("bamba", {"head_dim": 6}, "rotary_dim is 3, expected an even number up to head_dim=6"),
    ("bamba", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn', expected one of default"),
    ("bamba", {"mamba_d_head": 32}, r"mamba_d_head is 32, expected 64: mamba_expand \* hidden_size / mamba_n_heads"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp is False, expected one of True"),
    ("falcon_h1", {"ssm_multipliers": [1, 1]}, r"ssm_multipliers is \[1, 1\], expected 5 finite numbers"),
    ("falcon_h1", {"mlp_multipliers": [1, math.nan]}, r"mlp_multipliers is \[1, nan\], expected 2 finite numbers"),
    ("falcon_h1", {"lm_head_multiplier": 0}, "lm_head_multiplier is 0, expected a positive finite number"),
    ("falcon_h1", {"mamba_d_ssm": 1000}, "mamba_n_heads is None, expected a divisor of mamba_d_ssm = 1000"),
    ("falcon_h1", {"rope_scaling": {"type": "linear"}}, "rope_scaling: type is 'linear', expected one of default"),
    ("nemotron_h", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act is 'tanh', expected one of silu, gelu, relu2"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu', expected one of silu"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias is True, expected one of False"),
    ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias is True, expected one of False"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True, expected one of False"),
    ("nemotron_h", {"sliding_window": 512}, "sliding_window is 512, expected one of None"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts is 2, expected one of 1"),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX', expected a string of M, E"),
    ("nemotron_h", {"layers_block_type": ["mamba", "conv"]}, "layers_block_type is .*, expected a list of mamba"),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "M*", "num_hidden_layers": 3},
        "num_hidden_layers is 3, expected 2, the number of layers in hybrid_override_pattern",
    ),
    ("nemotron_h", {"n_group": 2, "topk_group": 3}, r"has top_groups=3, expected 1\.\.2 \(groups\)"),
    ("zamba2", {"hidden_act": "silu"}, "hidden_act is 'silu', expected one of gelu"),
    ("zamba2", {"use_conv_bias": False}, "use_conv_bias is False, expected one of True"),
    ("zamba2", {"use_long_context": True}, "use_long_context is True, expected one of False"),
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
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_released_models(name):
    values, (layers, mebibytes, channels) = STATES[name]
    spec = config_from_hf(values).pool_spec(DTypePolicy.bfloat16())
    assert (spec.recurrent_layers, spec.ssm_bytes(), spec.conv_channels) == (layers, mebibytes * 2**20, channels)
