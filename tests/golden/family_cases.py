"""The tiny models of the other families' goldens: between those of a family, its every switch, at odd sizes."""

import dataclasses
from typing import Any

BASES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "vocab_size": 31,
        "hidden_size": 18,
        "num_heads": 6,
        "head_dim": 6,
        "state_size": 5,
        "n_groups": 1,
        "conv_kernel": 3,
        "chunk_size": 7,
        "num_hidden_layers": 2,
    },
    "bamba": {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "mamba_n_heads": 6,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 7,
        "max_position_embeddings": 128,
    },
    "falcon_h1": {
        "vocab_size": 31,
        "hidden_size": 20,
        "intermediate_size": 18,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "mamba_d_ssm": 15,
        "mamba_n_heads": 3,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 7,
        "max_position_embeddings": 128,
    },
    "nemotron_h": {
        "vocab_size": 31,
        "hidden_size": 20,
        "intermediate_size": 18,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "mamba_num_heads": 3,
        "mamba_head_dim": 7,
        "ssm_state_size": 5,
        "n_groups": 1,
        "conv_kernel": 3,
        "chunk_size": 7,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 9,
        "moe_shared_expert_intermediate_size": 11,
    },
    "zamba2": {
        "vocab_size": 31,
        "hidden_size": 12,
        "intermediate_size": 14,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_attention_heads": 4,
        "num_mem_blocks": 1,
        "adapter_rank": 3,
        "n_mamba_heads": 3,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "chunk_size": 7,
        "max_position_embeddings": 128,
    },
    "qwen3_next": {
        "vocab_size": 31,
        "hidden_size": 20,
        "intermediate_size": 18,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 7,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 9,
        "shared_expert_intermediate_size": 11,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 128,
    },
}
BASES["qwen3_5_text"] = {
    name: value for name, value in BASES["qwen3_next"].items() if "expert" not in name and not name.startswith("moe")
}
BASES["qwen3_5_moe_text"] = {name: value for name, value in BASES["qwen3_next"].items() if name != "intermediate_size"}
# Of the layers of Qwen3-Next: what its successors have too.
QWEN_SWITCHES = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 1,
    "linear_conv_kernel_dim": 2,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
}
# Time step biases as in trained models: that of a delta rule makes its decay.
QWEN_TRAINED = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 1.3, 0.6, 1.1, 0.5],
    "mlp_multipliers": [0.7, 1.4],
}


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """One tiny model.

    Attributes:
        family: its `model_type`.
        name: of its folder in the family's.
        changes: of the family's base.
        seed: of its weights and tokens.
        length: tokens a row.
        trained_dt: time step biases spread over -9..1, as in trained models.
    """

    family: str
    name: str
    changes: dict[str, Any]
    seed: int
    length: int = 19
    trained_dt: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return BASES[self.family] | self.changes


FAMILY_CASES = (
    FamilyCase("mamba2", "plain", {}, seed=1),
    FamilyCase(
        "mamba2",
        "switches",
        {
            "num_heads": 3,
            "expand": 1,
            "n_groups": 3,
            "conv_kernel": 2,
            "use_bias": True,
            "use_conv_bias": False,
            "residual_in_fp32": False,
            "time_step_limit": [0.03, 0.3],
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
        seed=2,
    ),
    FamilyCase("mamba2", "trained_dt", {"state_size": 16, "conv_kernel": 4}, seed=3, length=41, trained_dt=True),
    FamilyCase("bamba", "plain", {}, seed=4),
    FamilyCase(
        "bamba",
        "switches",
        {
            "attn_layer_indices": [0, 2],
            "num_key_value_heads": None,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
            "mamba_n_heads": 3,
            "mamba_expand": 1,
            "mamba_n_groups": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.03, 0.3],
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        seed=5,
    ),
    FamilyCase("bamba", "trained_dt", {"mamba_d_state": 16, "mamba_d_conv": 4}, seed=6, length=41, trained_dt=True),
    FamilyCase("falcon_h1", "plain", FALCON_MULTIPLIERS, seed=7),
    FamilyCase(
        "falcon_h1",
        "switches",
        FALCON_MULTIPLIERS
        | {
            "num_key_value_heads": None,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "mamba_d_ssm": 18,
            "mamba_n_groups": 3,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "mlp_bias": True,
            "time_step_limit": [0.03, 0.3],
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        seed=8,
    ),
    FamilyCase(
        "falcon_h1",
        "trained_dt",
        {
            "mamba_d_ssm": None,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
        seed=9,
        length=41,
        trained_dt=True,
    ),
    FamilyCase("nemotron_h", "plain", {}, seed=10),
    FamilyCase(
        "nemotron_h",
        "switches",
        {
            "layers_block_type": None,
            "hybrid_override_pattern": "*EM-ME",
            "num_key_value_heads": 1,
            "mamba_num_heads": 6,
            "n_groups": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "mlp_hidden_act": "silu",
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "moe_latent_size": 6,
            "time_step_min": 0.03,
            "residual_in_fp32": True,
            "layer_norm_epsilon": 1e-3,
        },
        seed=11,
    ),
    FamilyCase(
        "nemotron_h",
        "trained_dt",
        {"ssm_state_size": 16, "conv_kernel": 4, "layers_block_type": ["mamba", "attention", "mamba", "moe"]},
        seed=12,
        length=41,
        trained_dt=True,
    ),
    FamilyCase("zamba2", "plain", {"num_key_value_heads": 2}, seed=13),
    FamilyCase(
        "zamba2",
        "switches",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "add_bias_linear": True,
            "mamba_expand": 1,
            "mamba_ngroups": 3,
            "time_step_min": 0.03,
            "rms_norm_eps": 1e-3,
        },
        seed=48,
    ),
    FamilyCase("zamba2", "trained_dt", {"mamba_d_state": 16, "mamba_d_conv": 4}, seed=15, length=41, trained_dt=True),
    FamilyCase("qwen3_next", "plain", {}, seed=105),
    FamilyCase(
        "qwen3_next",
        "switches",
        QWEN_SWITCHES
        | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False, "num_experts_per_tok": 3},
        seed=100,
    ),
    FamilyCase("qwen3_next", "trained_dt", QWEN_TRAINED, seed=100, length=41, trained_dt=True),
    FamilyCase("qwen3_5_text", "plain", {}, seed=103),
    FamilyCase("qwen3_5_text", "switches", QWEN_SWITCHES, seed=100),
    FamilyCase("qwen3_5_text", "trained_dt", QWEN_TRAINED, seed=114, length=41, trained_dt=True),
    FamilyCase("qwen3_5_moe_text", "plain", {}, seed=111),
    FamilyCase("qwen3_5_moe_text", "switches", QWEN_SWITCHES | {"num_experts_per_tok": 3}, seed=100),
    FamilyCase("qwen3_5_moe_text", "trained_dt", QWEN_TRAINED, seed=108, length=41, trained_dt=True),
)
