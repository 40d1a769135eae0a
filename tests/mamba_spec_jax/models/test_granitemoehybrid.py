"""Reading granitemoehybrid configurations in every spelling, what is refused, and that the weights cover the model."""

import math
import operator

import pytest
from flax import nnx

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import config_from_hf, granitemoehybrid
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.recurrent_config import Mamba2Config

TYPE = {"model_type": "granitemoehybrid"}


def test_defaults_are_those_of_transformers():
    assert config_from_hf(TYPE) == HybridConfig(
        model_type="granitemoehybrid",
        vocab_size=32000,
        hidden_size=4096,
        layer_types=("mamba",) * 32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        attention_scale=1.0,
        attention_bias=False,
        rope_theta=None,
        recurrent=Mamba2Config(
            heads=128,
            head_dim=64,
            state=256,
            groups=1,
            conv_width=4,
            conv_bias=True,
            proj_bias=False,
            chunk_size=256,
            time_step_limit=(0.0, math.inf),
        ),
        shared_intermediate_size=1024,
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=11008,
        norm_eps=1e-6,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        tie_embeddings=False,
        eos_token_ids=(2,),
    )


LAYERS = {"num_hidden_layers": 2}
ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        (LAYERS | {"layer_types": ["mamba", "attention"]}, "layer_types", ("mamba", "attention")),
        (LAYERS | {"layer_types": ["linear_attention", "full_attention"]}, "layer_types", ("mamba", "attention")),
        (LAYERS | {"layers_block_type": ["attention", "mamba"]}, "layer_types", ("attention", "mamba")),
        (LAYERS | {"layer_types": None}, "layer_types", ("mamba", "mamba")),
        ({"num_key_value_heads": None, "num_attention_heads": 16}, "num_key_value_heads", 16),
        ({"num_key_value_heads": 8}, "num_key_value_heads", 8),
        ({"head_dim": 80}, "head_dim", 80),
        ({"mamba_d_head": "auto", "mamba_n_heads": 64}, "recurrent.head_dim", 128),
        ({"mamba_d_head": 32, "mamba_expand": 1}, "recurrent.head_dim", 32),
        ({"position_embedding_type": None, "rope_theta": 5.0}, "rope_theta", None),
        ({"position_embedding_type": "nope", "rope_parameters": {"rope_type": "yarn"}}, "rope_theta", None),
        (ROPE, "rope_theta", 10_000.0),
        (ROPE | {"rope_theta": 300, "rope_scaling": None}, "rope_theta", 300.0),
        (ROPE | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta", 7.0),
        (ROPE | {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0}, "rope_theta", 7.0),
        (ROPE | {"rope_scaling": {"type": "default", "rope_theta": 7}}, "rope_theta", 7.0),
        ({"time_step_limit": [0, {"__float__": "Infinity"}]}, "recurrent.time_step_limit", (0.0, math.inf)),
        ({"time_step_limit": [0.01, math.inf]}, "recurrent.time_step_limit", (0.01, math.inf)),
        ({"time_step_limit": [0.01, 0.1]}, "recurrent.time_step_limit", (0.01, 0.1)),
        ({"eos_token_id": [7, 9]}, "eos_token_ids", (7, 9)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"embedding_multiplier": 12}, "embedding_multiplier", 12.0),
        ({"logits_scaling": 6}, "logits_divisor", 6.0),
        ({"num_local_experts": 0, "num_experts_per_tok": 0}, "num_experts", 0),
    ],
)
def test_spellings(values, field, expected):
    assert operator.attrgetter(field)(config_from_hf(TYPE | values)) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama', expected one of .*granitemoehybrid"),
        ({"model_type": None}, "model_type is None, expected one of .*granitemoehybrid"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected one of silu"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', expected an integer of at least 1"),
        ({"hidden_size": 4096.0}, r"hidden_size is 4096\.0, expected an integer"),
        ({"hidden_size": None}, "hidden_size is None, expected an integer"),
        ({"vocab_size": 0}, "vocab_size is 0, expected an integer of at least 1"),
        ({"mamba_d_state": True}, "mamba_d_state is True, expected an integer"),
        ({"mamba_d_conv": 1}, "mamba_d_conv is 1, expected an integer of at least 2"),
        ({"attention_multiplier": math.nan}, "attention_multiplier is nan, expected a finite number"),
        ({"embedding_multiplier": math.inf}, "embedding_multiplier is inf, expected a finite number"),
        ({"residual_multiplier": {"__float__": "NaN"}}, "residual_multiplier is .*, expected a finite number"),
        ({"logits_scaling": 0}, "logits_scaling is 0, expected a positive finite number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', expected a positive finite number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        (LAYERS | {"layer_types": ["mamba", "conv"]}, "layer_types is .*'conv'.*, expected a list of mamba, attention"),
        (LAYERS | {"layer_types": "mamba"}, "layer_types is 'mamba', expected a list"),
        ({"layer_types": ["mamba"]}, "num_hidden_layers is None, expected 1, the number of layer_types"),
        (LAYERS | {"layer_types": ["mamba"]}, "num_hidden_layers is 2, expected 1, the number of layer_types"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi', expected one of null, nope, rope"),
        (
            ROPE | {"rope_parameters": {"rope_type": "su"}},
            "rope_parameters: rope_type is 'su', expected one of def",
        ),
        (ROPE | {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (ROPE | {"rope_parameters": [1]}, "rope_parameters holds a list, expected an object"),
        (ROPE | {"rope_theta": -1}, "rope_theta is -1, expected a positive finite number"),
        ({"time_step_limit": [0.1]}, r"time_step_limit is \[0\.1\], expected two numbers"),
        ({"time_step_limit": [0.2, 0.1]}, "time_step_limit is .*, expected two numbers in ascending order"),
        ({"time_step_limit": [math.nan, 1]}, "time_step_limit is .*, expected two numbers"),
        ({"time_step_limit": None}, "time_step_limit is None, expected two numbers"),
        ({"mamba_d_head": 32}, r"mamba_d_head is 32, expected 64: mamba_expand \* hidden_size / mamba_n_heads"),
        ({"mamba_n_heads": 100}, r"mamba_n_heads is 100, expected a divisor of mamba_expand \* hidden_size = 8192"),
        ({"mamba_n_groups": 3}, "Mamba2Config.heads is 128, expected a multiple of groups = 3"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is \[1, -1\], expected a token id"),
    ],
)
def test_refusals_name_the_key(values, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(TYPE | values)


def test_config_must_be_an_object():
    with pytest.raises(ValueError, match=r"config\.json holds a list, expected an object"):
        config_from_hf([1])


SMALL = TYPE | {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 2,
    "num_local_experts": 0,
    "shared_intermediate_size": 10,
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_local_experts": 3},
        {"attention_bias": True, "mamba_proj_bias": True},
        {"mamba_conv_bias": False},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_every_parameter_has_one_weight(values):
    model = HybridModel.create(config_from_hf(SMALL | values))
    parameters = sorted(".".join(map(str, path)) for path, _ in nnx.to_flat_state(model.abstract_params()))
    weights = list(granitemoehybrid.weights(model.config))
    assert sorted(weight.path for weight in weights if weight.copy_of is None) == parameters
    assert len({weight.name for weight in weights}) == len(weights)
