"""falcon_h1: attention and Mamba-2 in parallel in every layer, a dense feed-forward part, and many multipliers."""

import math
from collections.abc import Iterator

from mamba_spec_jax.models.config import BranchMultipliers, HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 4096, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    head_dim = hf.integer("head_dim", minimum=1) if hf.has("head_dim") else hidden_size // attention_heads
    mamba_heads = hf.integer("mamba_n_heads", 128, minimum=1)
    mlp_gate, mlp_out = hf.numbers("mlp_multipliers", (1.0,) * 2)
    return HybridConfig(
        model_type="falcon_h1",
        vocab_size=hf.integer("vocab_size", 128000, minimum=1),
        hidden_size=hidden_size,
        layer_types=("parallel",) * hf.integer("num_hidden_layers", 32, minimum=1),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 8, attention_heads),
        head_dim=head_dim,
        # Scaling the keys scales the scores, rotated or not.
        attention_scale=hf.number("key_multiplier", 1.0) * head_dim**-0.5,
        attention_bias=hf.flag("attention_bias", False),
        **rotary(hf, head_dim, max_length=8192),
        recurrent=Mamba2Config(
            heads=mamba_heads,
            head_dim=_mamba_head_dim(hf, hidden_size, mamba_heads),
            state=hf.integer("mamba_d_state", 256, minimum=1),
            groups=hf.integer("mamba_n_groups", 1, minimum=1),
            conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
            conv_bias=hf.flag("mamba_conv_bias", True),
            proj_bias=hf.flag("mamba_proj_bias", False),
            out_bias=hf.flag("projectors_bias", False),
            chunk_size=hf.integer("mamba_chunk_size", 256, minimum=1),
            norm=_mamba_norm(hf),
            time_step_limit=hf.limits("time_step_limit", (0.0, math.inf)),
        ),
        shared_intermediate_size=hf.integer("intermediate_size", 14336, minimum=1),
        mlp_bias=hf.flag("mlp_bias", False),
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        embedding_multiplier=hf.number("embedding_multiplier", 1.0),
        logits_divisor=1 / hf.number("lm_head_multiplier", 1.0, positive=True),
        multipliers=BranchMultipliers(
            attention_in=hf.number("attention_in_multiplier", 1.0),
            attention_out=hf.number("attention_out_multiplier", 1.0),
            ssm_in=hf.number("ssm_in_multiplier", 1.0),
            ssm_out=hf.number("ssm_out_multiplier", 1.0),
            ssm=hf.numbers("ssm_multipliers", (1.0,) * 5),
            mlp_gate=mlp_gate,
            mlp_out=mlp_out,
        ),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a falcon_h1 checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i in range(len(config.layer_types)):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer.attention", config)
        yield from pieces.mamba(f"{stored}.mamba", f"{ours}.mixer.mamba", config)
        yield Weight(f"{stored}.pre_ff_layernorm.weight", f"{ours}.mlp_norm.weight")
        yield from pieces.gated_mlp(f"{stored}.feed_forward", f"{ours}.shared_mlp", config)
    yield Weight("model.final_layernorm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _mamba_head_dim(hf: HFConfig, hidden_size: int, heads: int) -> int:
    if "mamba_d_ssm" in hf.values and not hf.has("mamba_d_ssm"):
        inner = hf.integer("mamba_expand", 2, minimum=1) * hidden_size
        return pieces.mamba_head_dim(hf, inner, heads, "mamba_expand * hidden_size")
    return pieces.mamba_head_dim(hf, hf.integer("mamba_d_ssm", 1024, minimum=1), heads, "mamba_d_ssm")


def _mamba_norm(hf: HFConfig) -> str:
    if not hf.flag("mamba_rms_norm", False):
        return "none"
    return "before_gate" if hf.flag("mamba_norm_before_gate", True) else "gated"


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    without_effect=frozenset({"num_logits_to_keep"}),
    only={"hidden_act": keys.SILU, "layer_types": (None,), "layers_block_type": (None,)},
)
