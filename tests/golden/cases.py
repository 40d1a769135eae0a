"""The tiny models of the goldens: between them, every switch of a granitemoehybrid configuration, at odd sizes."""

import dataclasses
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "intermediate_size": 20,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "attention_multiplier": 0.25,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 20,
    "mamba_n_heads": 6,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 7,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 9, "layer_types": ["mamba", "attention"]}
MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.17,
    "logits_scaling": 0.45,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One tiny model.

    Attributes:
        name: of its folder.
        changes: of `BASE`.
        seed: of its weights and tokens.
        length: tokens a row.
        sharded: several weight files and an index.
        published_style: a `config.json` as released models have, with the older names of layers and RoPE.
        names_in_memory: weights named as the module names them, a tied head included.
        trained_dt: time step biases spread over -9..1, as in trained models.
    """

    name: str
    changes: dict[str, Any]
    seed: int
    length: int = 23
    sharded: bool = False
    published_style: bool = False
    names_in_memory: bool = False
    trained_dt: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config = BASE | self.changes
        return config | {"num_hidden_layers": len(config["layer_types"])}


CASES = (
    Case("dense", {}, seed=1),
    Case("moe", MOE, seed=2),
    Case(
        "rope",
        {
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "layer_types": ["attention", "mamba", "attention"],
            "tie_word_embeddings": True,
        },
        seed=3,
    ),
    Case("groups", {"mamba_n_groups": 3, "mamba_expand": 1}, seed=4),
    Case("no_conv_bias", {"mamba_conv_bias": False, "mamba_d_conv": 2, "num_key_value_heads": 3}, seed=5),
    Case("biases", {"mamba_proj_bias": True, "attention_bias": True}, seed=6),
    Case("multipliers", MOE | MULTIPLIERS, seed=7, names_in_memory=True),
    Case(
        "published",
        {
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
            "embedding_multiplier": 12,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 3,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 256,
            "tie_word_embeddings": True,
        },
        seed=8,
        published_style=True,
    ),
    Case(
        "published_rope_moe",
        MOE | MULTIPLIERS | {"position_embedding_type": "rope", "rope_theta": 5000.0, "head_dim": 8},
        seed=9,
        published_style=True,
    ),
    Case("sharded", MOE | {"num_experts_per_tok": 5, "mamba_n_groups": 2}, seed=10, sharded=True),
    Case("dt_limits", {"time_step_limit": [0.03, 0.3]}, seed=11),
    Case(
        "trained_dt",
        {"mamba_d_state": 16, "mamba_chunk_size": 8, "mamba_d_conv": 4, "tie_word_embeddings": True},
        seed=12,
        length=41,
        names_in_memory=True,
        trained_dt=True,
    ),
    Case("mamba_only", {"layer_types": ["mamba", "mamba"]}, seed=13),
)
