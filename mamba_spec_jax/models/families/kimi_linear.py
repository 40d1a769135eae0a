"""kimi_linear: delta rule layers with a decay per channel (KDA) and latent attention; experts in all but the first."""

from collections.abc import Iterator
from typing import cast

from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.models.config import HybridConfig, LatentDims
from mamba_spec_jax.models.families import keys, pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig

_EXPERT = ("w1", "w3", "w2")


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`, published or written by transformers; absent keys have transformers' defaults."""
    layers = hf.integer("num_hidden_layers", 27, minimum=1)
    latent = LatentDims(
        rank=hf.integer("kv_lora_rank", 512, minimum=1),
        shared=hf.integer("qk_rope_head_dim", 64, minimum=1),
        key=hf.integer("qk_nope_head_dim", 128, minimum=1),
        value=hf.integer("v_head_dim", 128, minimum=1),
        query_rank=hf.integer("q_lora_rank", minimum=1) if hf.has("q_lora_rank") else 0,
    )
    width = hf.integer("moe_intermediate_size", 1024, minimum=1)
    return HybridConfig(
        model_type="kimi_linear",
        vocab_size=hf.integer("vocab_size", 163840, minimum=1),
        hidden_size=hf.integer("hidden_size", 2304, minimum=1),
        layer_types=_layer_types(hf, layers),
        num_attention_heads=_attention_heads(hf),
        num_key_value_heads=1,
        head_dim=latent.rank + latent.shared,
        attention_scale=(latent.key + latent.shared) ** -0.5,
        attention_bias=hf.flag("attention_bias", False),
        latent=latent,
        recurrent=_recurrent(hf),
        shared_intermediate_size=width * hf.integer("n_shared_experts", 1, minimum=1),
        dense_layers=_dense_layers(hf, layers),
        mlp_intermediate_size=hf.integer("intermediate_size", 9216, minimum=1),
        num_experts=hf.integer("num_local_experts", 256, minimum=1),
        experts_per_token=hf.integer("num_experts_per_tok", 8, minimum=1),
        expert_intermediate_size=width,
        sigmoid_routing=SigmoidRouting(
            groups=hf.integer("n_group", 1, minimum=1),
            top_groups=hf.integer("topk_group", 1, minimum=1),
            normalized=hf.flag("norm_topk_prob", True),
            scale=hf.number("routed_scaling_factor", 2.446),
        ),
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        eos_token_ids=hf.token_ids("eos_token_id", 163586),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a kimi_linear checkpoint."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        mixer = _latent_attention if kind == "attention" else _gated_delta
        yield from mixer(f"{stored}.self_attn", f"{ours}.mixer", config)
        yield Weight(f"{stored}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight")
        if config.has_experts(i):
            yield from pieces.linear(f"{stored}.mlp.gate", f"{ours}.moe.router")
            yield Weight(f"{stored}.mlp.gate.e_score_correction_bias", f"{ours}.moe.router.correction")
            yield from pieces.experts(f"{stored}.mlp.experts", f"{ours}.moe", config, _EXPERT)
            yield from pieces.gated_mlp(f"{stored}.mlp.shared_experts", f"{ours}.shared_mlp", config)
        else:
            yield from pieces.gated_mlp(f"{stored}.mlp", f"{ours}.shared_mlp", config)
    yield Weight("model.norm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _latent_attention(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    if config.latent.query_rank:  # type: ignore[union-attr]  # the family has it
        yield from pieces.linear(f"{stored}.q_a_proj", f"{ours}.q_a_proj", config.attention_bias)
        yield Weight(f"{stored}.q_a_layernorm.weight", f"{ours}.q_a_norm.weight")
        yield from pieces.linear(f"{stored}.q_b_proj", f"{ours}.q_proj")
    else:
        yield from pieces.linear(f"{stored}.q_proj", f"{ours}.q_proj")
    yield from pieces.linear(f"{stored}.kv_a_proj_with_mqa", f"{ours}.kv_a_proj", config.attention_bias)
    yield Weight(f"{stored}.kv_a_layernorm.weight", f"{ours}.kv_a_norm.weight")
    yield from pieces.linear(f"{stored}.kv_b_proj", f"{ours}.kv_b_proj")
    yield from pieces.linear(f"{stored}.o_proj", f"{ours}.o_proj", config.attention_bias)


def _gated_delta(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    delta = cast(GatedDeltaConfig, config.recurrent)
    yield Weight(
        f"{stored}.in_proj.weight",
        f"{ours}.in_proj.kernel",
        Layout.SWAPPED,
        parts=tuple(f"{stored}.{part}_proj.weight" for part in ("q", "k", "v", "g_a", "b", "f_a")),
        part_rows=(delta.inner, delta.inner, delta.inner, delta.rank, delta.heads, delta.rank),
    )
    yield from pieces.linear(f"{stored}.g_b_proj", f"{ours}.gate_proj")
    yield from pieces.linear(f"{stored}.f_b_proj", f"{ours}.decay_proj")
    yield from pieces.gated_delta(stored, ours, config, norm="o_norm", out="o_proj")


def _attention_heads(hf: HFConfig) -> int:
    """Latent attention has keys and values for every head."""
    heads = hf.integer("num_attention_heads", 32, minimum=1)
    if heads // pieces.kv_heads(hf, 32, heads) != 1:
        raise hf.refusal("num_key_value_heads", f"null or {heads}, which is num_attention_heads")
    return heads


def _recurrent(hf: HFConfig) -> GatedDeltaConfig:
    """Published files nest these under a key; transformers writes them at the top level."""
    given = hf.nested("linear_attn_config")

    def size(published: str, key: str, default: int, minimum: int = 1) -> int:
        return given.integer(published, hf.integer(key, default, minimum=minimum), minimum=minimum)

    heads, head_dim = size("num_heads", "linear_num_heads", 32), size("head_dim", "linear_head_dim", 128)
    return GatedDeltaConfig(
        heads=heads,
        key_heads=heads,
        head_dim=head_dim,
        state=head_dim,
        conv_width=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, minimum=2),
        rank=head_dim,
        gate="sigmoid",
    )


def _layer_types(hf: HFConfig, count: int) -> tuple[str, ...]:
    given = hf.nested("linear_attn_config")
    if hf.has("layer_types"):
        return pieces.periodic_layer_types(hf, count, 4)
    if not given.has("full_attn_layers"):
        return tuple("attention" if i and i % 4 == 0 else "gated_delta" for i in range(count))
    attends, recurs = (given.token_ids(key, None) for key in ("full_attn_layers", "kda_layers"))  # counted from one
    if sorted((*attends, *recurs)) != list(range(1, count + 1)):
        raise given.refusal("kda_layers", f"the layers 1..{count} that full_attn_layers leaves")
    return tuple("attention" if i in attends else "gated_delta" for i in range(1, count + 1))


def _dense_layers(hf: HFConfig, count: int) -> tuple[int, ...]:
    if not hf.has("mlp_layer_types"):
        return tuple(range(min(count, hf.integer("first_k_dense_replace", 1, minimum=0))))
    kinds = hf.choices("mlp_layer_types", ("dense", "sparse"))
    if len(kinds) != count:
        raise hf.refusal("mlp_layer_types", f"a type for each of the {count} layers")
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(
        ("moe_renormalize", "norm_topk_prob"),
        ("num_expert_group", "n_group"),
        ("num_experts", "num_local_experts"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_shared_experts", "n_shared_experts"),
    ),
    # The output projection is never tied; the two dims of heads are derived from others.
    without_effect=keys.UNROTATED
    | {
        "head_dim",
        "max_position_embeddings",
        "model_max_length",
        "pretraining_tp",
        "qk_head_dim",
        "tie_word_embeddings",
    },
    only={"hidden_act": keys.SILU},
    renames=((".block_sparse_moe.", ".mlp."), ("self_attn.forget_gate.", "self_attn.")),
)
