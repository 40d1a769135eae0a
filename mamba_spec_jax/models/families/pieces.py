"""What several families have in common: weights of the same layers, and keys of the same meaning."""

from collections.abc import Iterator

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families.base import Layout, Weight
from mamba_spec_jax.models.hf_config import HFConfig

# Published files and those that transformers writes call the same layers differently.
LAYER_TYPES = {
    "mamba": "mamba",
    "attention": "attention",
    "linear_attention": "mamba",
    "full_attention": "attention",
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


def mamba(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    """`Mamba2Mixer`."""
    yield from linear(f"{stored}.in_proj", f"{ours}.in_proj", config.recurrent.proj_bias)
    yield from linear(f"{stored}.out_proj", f"{ours}.out_proj", config.recurrent.out_bias)
    yield Weight(f"{stored}.conv1d.weight", f"{ours}.conv_weight", Layout.DEPTHWISE)
    if config.recurrent.conv_bias:
        yield Weight(f"{stored}.conv1d.bias", f"{ours}.conv_bias")
    for name in ("dt_bias", "A_log", "D"):
        yield Weight(f"{stored}.{name}", f"{ours}.{name}")
    if config.recurrent.norm != "none":
        yield Weight(f"{stored}.norm.weight", f"{ours}.norm.weight")


def gated_mlp(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    """`GatedMLP`, of which checkpoints store gate and up apart."""
    for kind, part, layout in (("weight", "kernel", Layout.SWAPPED), ("bias", "bias", Layout.SAME)):
        if kind == "bias" and not config.mlp_bias:
            continue
        halves = (f"{stored}.gate_proj.{kind}", f"{stored}.up_proj.{kind}")
        yield Weight(f"{stored}.gate_up_proj.{kind}", f"{ours}.input_linear.{part}", layout, parts=halves)
        yield Weight(f"{stored}.down_proj.{kind}", f"{ours}.output_linear.{part}", layout)


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


def mamba_head_dim(hf: HFConfig, inner: int, heads: int, meaning: str, key: str = "mamba_n_heads") -> int:
    """P, from the width `inner` that the heads share; `meaning` says what that width is."""
    if inner % heads:
        raise hf.refusal(key, f"a divisor of {meaning} = {inner}")
    expected = inner // heads
    if hf.values.get("mamba_d_head", "auto") not in ("auto", expected):
        raise hf.refusal("mamba_d_head", f"{expected}: {meaning} / {key}")
    return expected


def rope_theta(hf: HFConfig, default: float = 10_000.0) -> float:
    """The base of plain rotary embedding; every other kind of it is refused."""
    # `rope_scaling` and a `rope_theta` beside it are what files had before `rope_parameters`.
    rope = hf.nested("rope_scaling" if hf.has("rope_scaling") else "rope_parameters")
    rope.choice("rope_type" if rope.has("rope_type") else "type", "default", ["default"])
    return rope.number("rope_theta", hf.number("rope_theta", default, positive=True), positive=True)
