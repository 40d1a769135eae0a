"""What several families have in common: weights of the same layers, and keys of the same meaning."""

from collections.abc import Iterator
from typing import cast

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families.base import Layout, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import GatedDeltaConfig, Mamba2Config

# Published files and those that transformers writes call the same layers differently.
LAYER_TYPES = {
    "mamba": "mamba",
    "attention": "attention",
    "linear_attention": "mamba",
    "full_attention": "attention",
}
GATED_DELTA_LAYER_TYPES = {
    "linear_attention": "gated_delta",
    "full_attention": "attention",
    "mamba": "gated_delta",
    "attention": "attention",
}


def linear(stored: str, ours: str, bias: bool = False) -> Iterator[Weight]:
    """A linear layer."""
    yield Weight(f"{stored}.weight", f"{ours}.kernel", Layout.SWAPPED)
    if bias:
        yield Weight(f"{stored}.bias", f"{ours}.bias")


def attention(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    """`Attention`."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from linear(f"{stored}.{name}", f"{ours}.{name}", config.attention_bias)
    if config.attention_norm != "none":
        for name in ("q_norm", "k_norm"):
            yield Weight(f"{stored}.{name}.weight", f"{ours}.{name}.weight")


def mamba(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    """`Mamba2Mixer`."""
    recurrent = cast(Mamba2Config, config.recurrent)
    yield from linear(f"{stored}.in_proj", f"{ours}.in_proj", recurrent.proj_bias)
    yield from linear(f"{stored}.out_proj", f"{ours}.out_proj", recurrent.out_bias)
    yield Weight(f"{stored}.conv1d.weight", f"{ours}.conv_weight", Layout.DEPTHWISE)
    if recurrent.conv_bias:
        yield Weight(f"{stored}.conv1d.bias", f"{ours}.conv_bias")
    for name in ("dt_bias", "A_log", "D"):
        yield Weight(f"{stored}.{name}", f"{ours}.{name}")
    if recurrent.norm != "none":
        yield Weight(f"{stored}.norm.weight", f"{ours}.norm.weight")


def gated_delta(
    stored: str, ours: str, config: HybridConfig, *, norm: str = "norm", out: str = "out_proj"
) -> Iterator[Weight]:
    """`GatedDeltaMixer` but for its projections in; `norm` and `out` are what the checkpoint calls these two."""
    delta = cast(GatedDeltaConfig, config.recurrent)
    keys = delta.key_heads * delta.state
    yield Weight(
        f"{stored}.conv1d.weight",
        f"{ours}.conv_weight",
        Layout.DEPTHWISE,
        parts=tuple(f"{stored}.{name}_conv1d.weight" for name in "qkv"),
        part_rows=(keys, keys, delta.inner),
        even_parts=True,
    )
    yield Weight(f"{stored}.dt_bias", f"{ours}.dt_bias")
    yield Weight(f"{stored}.A_log", f"{ours}.A_log", Layout.PER_HEAD if delta.rank else Layout.SAME)
    yield Weight(f"{stored}.{norm}.weight", f"{ours}.norm.weight")
    yield from linear(f"{stored}.{out}", f"{ours}.out_proj")


def experts(
    stored: str, ours: str, config: HybridConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Weight]:
    """The experts of a gated `SparseMoE`, stacked, or one by one with projections of these `names`."""
    numbers = range(config.num_experts)
    halves = tuple(f"{stored}.{expert}.{name}.weight" for expert in numbers for name in names[:2])
    downs = tuple(f"{stored}.{expert}.{names[2]}.weight" for expert in numbers)
    yield Weight(f"{stored}.gate_up_proj", f"{ours}.gate_up_proj", Layout.SWAPPED, parts=halves)
    yield Weight(f"{stored}.down_proj", f"{ours}.down_proj", Layout.SWAPPED, parts=downs)


def gated_mlp(
    stored: str, ours: str, config: HybridConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Iterator[Weight]:
    """`GatedMLP`, of which checkpoints store gate and up apart; `names` are what they call its projections."""
    gate, up, down = names
    for kind, part, layout in (("weight", "kernel", Layout.SWAPPED), ("bias", "bias", Layout.SAME)):
        if kind == "bias" and not config.mlp_bias:
            continue
        halves = (f"{stored}.{gate}.{kind}", f"{stored}.{up}.{kind}")
        yield Weight(f"{stored}.gate_up_proj.{kind}", f"{ours}.input_linear.{part}", layout, parts=halves)
        yield Weight(f"{stored}.{down}.{kind}", f"{ours}.output_linear.{part}", layout)


def output_head(embedding: str, config: HybridConfig) -> Iterator[Weight]:
    """The output projection, which may be the `embedding`."""
    if config.tie_embeddings:
        yield Weight("lm_head.weight", "embed_tokens.embedding", copy_of=embedding)
    else:
        yield Weight("lm_head.weight", "lm_head.kernel", Layout.SWAPPED)


def kv_heads(hf: HFConfig, default: int, heads: int) -> int:
    """`num_key_value_heads`, where null says as many as there are heads."""
    if "num_key_value_heads" in hf.values and not hf.has("num_key_value_heads"):
        return heads
    return hf.integer("num_key_value_heads", default, minimum=1)


def mamba_head_dim(
    hf: HFConfig, inner: int, heads: int, meaning: str, names: tuple[str, str] = ("mamba_n_heads", "mamba_d_head")
) -> int:
    """P, from the width `inner` that the heads share; `meaning` says what that is, `names` are those of H and P."""
    if inner % heads:
        raise hf.refusal(names[0], f"a divisor of {meaning} = {inner}")
    expected = inner // heads
    if hf.values.get(names[1], "auto") not in ("auto", expected):
        raise hf.refusal(names[1], f"{expected}: {meaning} / {names[0]}")
    return expected


def periodic_layer_types(hf: HFConfig, count: int, interval: int) -> tuple[str, ...]:
    """`layer_types` of gated delta rule and attention layers; without any, every `interval`-th one attends."""
    if not hf.has("layer_types"):
        return tuple("gated_delta" if (i + 1) % interval else "attention" for i in range(count))
    kinds = hf.choices("layer_types", GATED_DELTA_LAYER_TYPES)
    if len(kinds) != count:
        raise hf.refusal("num_hidden_layers", f"{len(kinds)}, the number of layer_types")
    return tuple(GATED_DELTA_LAYER_TYPES[kind] for kind in kinds)


def gated_delta_config(hf: HFConfig) -> GatedDeltaConfig:
    """The gated delta rule of the Qwen families."""
    return GatedDeltaConfig(
        heads=hf.integer("linear_num_value_heads", 32, minimum=1),
        key_heads=hf.integer("linear_num_key_heads", 16, minimum=1),
        head_dim=hf.integer("linear_value_head_dim", 128, minimum=1),
        state=hf.integer("linear_key_head_dim", 128, minimum=1),
        conv_width=hf.integer("linear_conv_kernel_dim", 4, minimum=2),
    )
