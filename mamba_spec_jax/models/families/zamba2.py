"""zamba2: Mamba-2 layers, some of which add one of a few shared transformer blocks, with adapters for each use."""

import math
from collections.abc import Iterator
from typing import Any

from mamba_spec_jax.models.config import HybridConfig, SharedBlocks
from mamba_spec_jax.models.families import pieces
from mamba_spec_jax.models.families.base import Family, Layout, Weight
from mamba_spec_jax.models.families.rotary import rotary
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.recurrent_config import Mamba2Config

_LAYER_TYPES = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "shared"}
_MAMBA_KEYS = ("n_mamba_heads", "mamba_headdim")
_DEFAULT_LAYERS = 54
_DEFAULT_SHARED = (6, 12, 18, 24, 30, 36, 42, 47, 51)


def read_config(hf: HFConfig) -> HybridConfig:
    """The model of a `config.json`; absent keys have transformers' defaults.

    The time step is clamped as in transformers' full forward, to `time_step_min` and more; its one-token step does not
    clamp at all.
    """
    hidden_size = hf.integer("hidden_size", 2560, minimum=1)
    attention_heads = hf.integer("num_attention_heads", 32, minimum=1)
    if 2 * hidden_size % attention_heads:
        raise hf.refusal("num_attention_heads", f"a divisor of 2 * hidden_size = {2 * hidden_size}")
    head_dim = _derived(hf, "attention_head_dim", 2 * hidden_size // attention_heads)
    _derived(hf, "attention_hidden_size", 2 * hidden_size)
    kv_heads = pieces.kv_heads(hf, attention_heads, attention_heads)
    mamba_heads = hf.integer("n_mamba_heads", 8, minimum=1)
    inner = hf.integer("mamba_expand", 2, minimum=1) * hidden_size
    bias = hf.flag("add_bias_linear", False)
    layer_types = _layer_types(hf)
    _derived(hf, "hybrid_layer_ids", [i for i, kind in enumerate(layer_types) if kind == "shared"])
    adapts_attention = hf.flag("use_shared_attention_adapter", False)
    if adapts_attention and kv_heads != attention_heads:
        raise hf.refusal("num_key_value_heads", f"{attention_heads}, all the heads, with use_shared_attention_adapter")
    shared = SharedBlocks(
        # Blocks after as many as there are layers to use them are in no checkpoint.
        count=min(hf.integer("num_mem_blocks", 1, minimum=1), max(1, layer_types.count("shared"))),
        adapter_rank=hf.integer("adapter_rank", 128, minimum=1),
        adapts_attention=adapts_attention,
    )
    return HybridConfig(
        model_type="zamba2",
        vocab_size=hf.integer("vocab_size", 32000, minimum=1),
        hidden_size=hidden_size,
        layer_types=layer_types,
        separate_feed_forward=True,
        num_attention_heads=attention_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        attention_scale=(head_dim / 2) ** -0.5,
        **(rotary(_lengthened(hf), head_dim, max_length=4096) if hf.flag("use_mem_rope", False) else {}),
        recurrent=Mamba2Config(
            heads=mamba_heads,
            head_dim=pieces.mamba_head_dim(hf, inner, mamba_heads, "mamba_expand * hidden_size", _MAMBA_KEYS),
            state=hf.integer("mamba_d_state", 64, minimum=1),
            groups=hf.integer("mamba_ngroups", 1, minimum=1),
            conv_width=hf.integer("mamba_d_conv", 4, minimum=2),
            proj_bias=bias,
            out_bias=bias,
            chunk_size=hf.integer("chunk_size", 256, minimum=1),
            norm_eps=1e-5,
            time_step_limit=(hf.number("time_step_min", 0.001, positive=True), math.inf),
        ),
        shared_intermediate_size=(
            hf.integer("intermediate_size", minimum=1) if hf.has("intermediate_size") else 4 * hidden_size
        ),
        mlp_activation="gelu",
        mlp_bias=bias,
        shared_blocks=shared if "shared" in layer_types else None,
        norm_eps=hf.number("rms_norm_eps", 1e-5, positive=True),
        tie_embeddings=True,
        eos_token_ids=hf.token_ids("eos_token_id", 2),
    )


def weights(config: HybridConfig) -> Iterator[Weight]:
    """Every weight of a zamba2 checkpoint; those of a shared block may be repeated under every layer that uses it."""
    yield Weight("model.embed_tokens.weight", "embed_tokens.embedding")
    shared_layers = [i for i, kind in enumerate(config.layer_types) if kind == "shared"]
    for i, kind in enumerate(config.layer_types):
        stored, ours = f"model.layers.{i}", f"layers.{i}"
        if kind == "shared":
            yield from _shared(config, shared_layers, shared_layers.index(i))
            yield from pieces.linear(f"{stored}.linear", f"{ours}.shared.linear")
            stored = f"{stored}.mamba_decoder"
        yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
        yield from pieces.mamba(f"{stored}.mamba", f"{ours}.mixer", config)
    yield Weight("model.final_layernorm.weight", "norm.weight")
    yield from pieces.output_head("model.embed_tokens.weight", config)


def _shared(config: HybridConfig, layers: list[int], use: int) -> Iterator[Weight]:
    """What the layer with the `use`-th use of a shared block stores: the block, and all adapters of that block."""
    count = config.shared_blocks.count  # type: ignore[union-attr]  # there is a shared layer
    first = use % count
    stored, original = (f"model.layers.{layers[number]}.shared_transformer" for number in (use, first))
    for weight in _block(stored, f"shared_blocks.{first}", config):
        yield weight if use == first else _repeating(weight, stored, original)
    for other in range(first, len(layers), count):
        for weight in _adapters(stored, other, f"layers.{layers[other]}.shared", config):
            yield weight if use == first else _repeating(weight, stored, original)


def _block(stored: str, ours: str, config: HybridConfig) -> Iterator[Weight]:
    yield Weight(f"{stored}.input_layernorm.weight", f"{ours}.input_norm.weight")
    yield from pieces.attention(f"{stored}.self_attn", f"{ours}.attention", config)
    yield Weight(f"{stored}.pre_ff_layernorm.weight", f"{ours}.mlp_norm.weight")
    for name, path in (("gate_up_proj", "input_linear"), ("down_proj", "output_linear")):
        yield from pieces.linear(f"{stored}.feed_forward.{name}", f"{ours}.mlp.{path}", config.mlp_bias)


def _adapters(stored: str, use: int, ours: str, config: HybridConfig) -> Iterator[Weight]:
    adapters = [(f"{stored}.feed_forward.gate_up_proj_adapter_list.{use}", f"{ours}.mlp_adapter")]
    if config.shared_blocks.adapts_attention:  # type: ignore[union-attr]  # there is a shared layer
        adapters += [
            (f"{stored}.self_attn.linear_{name}_adapter_list.{use}", f"{ours}.attention_adapters.{number}")
            for number, name in enumerate("qkv")
        ]
    for name, path in adapters:
        yield Weight(f"{name}.0.weight", f"{path}.down.kernel", Layout.SWAPPED)
        yield Weight(f"{name}.1.weight", f"{path}.up.kernel", Layout.SWAPPED)


def _repeating(weight: Weight, stored: str, original: str) -> Weight:
    return Weight(weight.name, weight.path, weight.layout, copy_of=weight.name.replace(stored, original, 1))


def _layer_types(hf: HFConfig) -> tuple[str, ...]:
    count = hf.integer("num_hidden_layers", _DEFAULT_LAYERS, minimum=1)
    if not hf.has("layers_block_type"):
        if count != _DEFAULT_LAYERS:
            raise hf.refusal("num_hidden_layers", f"{_DEFAULT_LAYERS} where there are no layers_block_type")
        return tuple("shared" if i in _DEFAULT_SHARED else "mamba" for i in range(count))
    kinds = tuple(_LAYER_TYPES[kind] for kind in hf.choices("layers_block_type", _LAYER_TYPES))
    if len(kinds) != count:
        raise hf.refusal("num_hidden_layers", f"{len(kinds)}, the number of layers_block_type")
    return kinds


def _lengthened(hf: HFConfig) -> HFConfig:
    """A long context replaces the number of positions, which scaled rotary embedding depends on."""
    if not hf.flag("use_long_context", False):
        return hf
    return HFConfig({**hf.values, "max_position_embeddings": 16384}, hf.source, hf.names)


def _derived(hf: HFConfig, key: str, value: Any) -> Any:
    """What transformers derives from other keys and writes beside them; another value is refused."""
    return hf.choice(key, value, [value])


FAMILY = Family(
    read_config=read_config,
    weights=weights,
    aliases=(("layer_types", "layers_block_type"), ("head_dim", "attention_head_dim")),
    # Convolutions have a bias, whatever `use_conv_bias` says.
    without_effect=frozenset(
        {
            "kv_channels",
            "num_logits_to_keep",
            "num_query_groups",
            "time_step_floor",
            "time_step_max",
            "use_conv_bias",
            "use_mamba_kernels",
            "use_mem_eff_path",
        }
    ),
    # Without tied embeddings transformers does not share the blocks either.
    only={"hidden_act": ("gelu",), "tie_word_embeddings": (True,)},
)
