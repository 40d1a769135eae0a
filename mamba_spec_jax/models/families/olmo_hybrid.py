"""olmo_hybrid: gated delta rule layers, and attention layers that norm what their branches give."""

from collections.abc import Iterator
from typing import cast

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.families.rotary import rope_parameters, rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults."""
    hidden_size = hf.integer("hidden_size", 3840, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 30, minimum=1)
    if not hf.has("head_dim") and hidden_size % attention_heads:
        raise hf.refusal("num_attention_heads", f"a divisor of hidden_size = {hidden_size}")
    head_dim = _or(hf, "head_dim", hidden_size // attention_heads)
    return HybridConfig(
        model_type="olmo_hybrid",
        vocab_size=hf.integer("vocab_size", 100352, minimum=1),
        hidden_size=hidden_size,
        layer_types=_layer_types(hf),
        num_attention_heads=attention_heads,
        num_key_value_heads=_or(hf, "num_key_value_heads", attention_heads),
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias", False),
        attention_norm="all",
        attention_norms_output=True,
        **(rotary(hf, head_dim, max_length=65536) if _rotates(hf) else {}),
        recurrent=_recurrent(hf, hidden_size, attention_heads),
        shared_intermediate_size=hf.integer("intermediate_size", 11008, minimum=1),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        eos_token_ids=hf.token_ids("eos_token_id", 100257),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of an olmo_hybrid checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        if kind == "attention":
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
            yield from pieces.attention(f"{stored}.self_attn", f"{ours}.mixer", config)
        else:
            norms = ("input_layernorm", "post_attention_layernorm")
            yield from _gated_delta(f"{stored}.linear_attn", f"{ours}.mixer", config)
        yield Weight(f"{stored}.{norms[0]}.weight", f"{ours}.input_norm.weight")
        yield Weight(f"{stored}.{norms[1]}.weight", f"{ours}.mlp_norm.weight")
        yield from pieces.gated_mlp(f"{stored}.mlp", f"{ours}.shared_mlp", config)
    yield Weight("model.norm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _gated_delta(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    delta = cast(GatedDeltaConfig, config.recurrent)
    keys = delta.key_heads * delta.state
    yield Weight(
        f"{stored}.in_proj.weight",
        f"{ours}.in_proj.kernel",
        Layout.SWAPPED,
        parts=tuple(f"{stored}.{part}_proj.weight" for part in "qkvgba"),
        part_rows=(keys, keys, delta.inner, delta.inner, delta.heads, delta.heads),
    )
    yield from pieces.gated_delta(stored, ours, config, norm="o_norm", out="o_proj")


def _recurrent(hf: HFConfig, hidden_size: int, attention_heads: int) -> GatedDeltaConfig:
    key_heads = _or(hf, "linear_num_key_heads", attention_heads)
    state = _or(hf, "linear_key_head_dim", int(0.75 * hidden_size / key_heads))
    return GatedDeltaConfig(
        heads=_or(hf, "linear_num_value_heads", attention_heads),
        key_heads=key_heads,
        head_dim=_or(hf, "linear_value_head_dim", 2 * state),
        state=state,
        conv_width=hf.integer("linear_conv_kernel_dim", 4, minimum=2),
        beta_scale=2.0 if hf.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    count = hf.integer("num_hidden_layers", 32, minimum=2)
    kinds = pieces.periodic_layer_types(hf, count, 4)
    if not hf.has("layer_types") and "attention" not in kinds:
        return (*kinds[:-1], "attention")
    if len(set(kinds)) < 2:
        raise hf.refusal("layer_types", "a layer of each type at least")
    return kinds


def _rotates(hf: HFConfig) -> bool:
    """Released models have no rotary embedding, and say so by a base of null."""
    rope = rope_parameters(hf)
    holder = rope if "rope_theta" in rope.values else hf
    return "rope_theta" not in holder.values or holder.has("rope_theta")


def _or(hf: HFConfig, key: str, default: int) -> int:
    """An integer, where null means the default too."""
    return hf.integer(key, minimum=1) if hf.has(key) else default


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    without_effect=frozenset(  # they say how weights are drawn
        {"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"}
    ),
    only={"hidden_act": keys.SILU},
    renames=(
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
    unused=("mtp.",),
)
