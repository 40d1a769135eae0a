"""bamba: Mamba-2 layers and a few attention layers with half-rotated heads, each with a dense feed-forward part."""

import math
from collections.abc import Iterator

from mamba_spec_jax.models.config import HybridConfig
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
    inner = hf.integer("mamba_expand", 2, minimum=1) * hidden_size
    bias = hf.flag("mamba_proj_bias", False)
    return HybridConfig(
        model_type="bamba",
        vocab_size=hf.integer("vocab_size", 128000, minimum=1),
        hidden_size=hidden_size,
        layer_types=_layer_types(hf),
        num_attention_heads=attention_heads,
        num_key_value_heads=pieces.kv_heads(hf, 8, attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias", False),
        # Half of a head, unless the rope parameters say otherwise; beside them transformers knows no other fraction.
        **rotary(hf, head_dim, max_length=262144, fraction=0.5),
        recurrent=Mamba2Config(
            heads=mamba_heads,
            head_dim=pieces.mamba_head_dim(hf, inner, mamba_heads, "mamba_expand * hidden_size"),
            state=hf.integer("mamba_d_state", 256, minimum=1),
            groups=hf.integer("mamba_n_groups", 1, minimum=1),
            conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
            conv_bias=hf.flag("mamba_conv_bias", True),
            proj_bias=bias,
            out_bias=bias,
            chunk_size=hf.integer("mamba_chunk_size", 256, minimum=1),
            time_step_limit=hf.limits("time_step_limit", (0.0, math.inf)),
        ),
        shared_intermediate_size=hf.integer("intermediate_size", 14336, minimum=1),
        mlp_bias=hf.flag("mlp_bias", False),
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a bamba checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        if kind == "attention":
            yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
        else:
            yield from pieces.mamba(f"{stored}.mamba", f"{ours}.mixer", config)
        yield Weight(f"{stored}.pre_ff_layernorm.weight", f"{ours}.mlp_norm.weight")
        yield from pieces.gated_mlp(f"{stored}.feed_forward", f"{ours}.shared_mlp", config)
    yield Weight("model.final_layernorm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    count = hf.integer("num_hidden_layers", 32, minimum=1)
    indices = hf.values.get("attn_layer_indices") or []
    if not isinstance(indices, list | tuple) or any(index not in range(count) for index in indices):
        raise hf.refusal("attn_layer_indices", f"a list of layers among 0..{count - 1}")
    return tuple("attention" if i in indices else "mamba" for i in range(count))


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    without_effect=frozenset({"num_logits_to_keep", "partial_rotary_factor", "z_loss_coefficient"}),
    # `attn_layer_indices` say which layers attend: transformers refuses any other list of them.
    only={"hidden_act": keys.SILU, "layer_types": (None,), "layers_block_type": (None,)},
)
