"""The tiny models whose rotary embeddings are scaled: every kind of scaling in every family."""

import dataclasses
from typing import Any

from family_cases import BASES

ORIGINAL, LENGTH = 8, 20
# Every kind, where a family rotates `half` pairs.
HALVES = {"granitemoehybrid": 4, "falcon_h1": 3, "zamba2": 3, "bamba": 2, "qwen3_next": 2, "qwen3_5_text": 2,
          "qwen3_5_moe_text": 2, "olmo_hybrid": 3, "lfm2": 3}  # fmt: skip
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 6,
        **TWO_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 10,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 7,
    },
    "bamba": BASES["bamba"] | {"num_hidden_layers": 2, "head_dim": 8},
    "falcon_h1": BASES["falcon_h1"] | {"num_hidden_layers": 1},
    "zamba2": BASES["zamba2"]
    | {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "use_mem_rope": True},
    "olmo_hybrid": BASES["olmo_hybrid"] | TWO_LAYERS | {"head_dim": 6, "num_attention_heads": 5},
    "lfm2": BASES["lfm2"] | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    **{
        family: BASES[family] | TWO_LAYERS | {"partial_rotary_factor": 0.5}
        for family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}  # fmt: skip


def rope_parameters(half: int) -> dict[str, dict[str, Any]]:
    """Rope parameters by the name of the kind, for `half` rotated pairs."""
    ramp = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_slow": 0.25}
    short, long = ([first + step * i for i in range(half)] for first, step in ((1.0, 0.3), (2.0, 1.7)))
    longrope = {"rope_type": "longrope", "short_factor": short, "long_factor": long,
                "original_max_position_embeddings": ORIGINAL}  # fmt: skip
    return {
        "default": {"rope_type": "default", "rope_theta": 300.0, "factor": 3.0},
        "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
        "dynamic": {"rope_type": "dynamic", "factor": 3.0},
        "yarn": ramp | {"beta_fast": 3.0, "rope_theta": 20.0},
        "yarn_exact": ramp | {"attention_factor": 1.3, "truncate": False, "beta_fast": 2, "rope_theta": 30.0},
        "yarn_mscale": ramp | {"factor": None, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 4.0,
                               "rope_theta": 9.0},
        "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0,
                   "original_max_position_embeddings": ORIGINAL, "rope_theta": 30.0},
        "longrope": longrope,
        "longrope_factor": longrope | {"factor": 3.0, "rope_theta": 300.0},
        "longrope_magnitude": longrope | {"attention_factor": 0.8},
        "proportional": {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.7, "factor": 2.0},
    }  # fmt: skip


def max_length(kind: str) -> int:
    """`max_position_embeddings` of a case: that of a dynamic scaling is its original length."""
    return ORIGINAL if kind == "dynamic" else 4 * ORIGINAL


def config(family: str, kind: str) -> dict[str, Any]:
    """What goes to transformers' configuration class."""
    values = FAMILIES[family] | {"max_position_embeddings": max_length(kind)}
    return values | {"rope_parameters": rope_parameters(HALVES[family])[kind]}


@dataclasses.dataclass(frozen=True)
class RotaryCase:
    """One model whose logits are stored.

    Attributes:
        family: its `model_type`.
        kind: of the scaling, as in `rope_parameters`.
        seed: of weights and tokens.
    """

    family: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}_{self.kind}"


CASES = (
    RotaryCase("bamba", "linear", 1),
    RotaryCase("zamba2", "dynamic", 2),
    RotaryCase("qwen3_5_text", "yarn", 3),
    RotaryCase("olmo_hybrid", "llama3", 4),
    RotaryCase("lfm2", "longrope", 5),
    RotaryCase("falcon_h1", "proportional", 6),
)
