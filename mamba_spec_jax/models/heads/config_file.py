"""A draft head's `config.json`: what it says of the head, and how it is written."""

import dataclasses
from typing import Any

from mamba_spec_jax.models.families.rotary import rope_parameters, rotary
from mamba_spec_jax.models.heads.config import LAYER_TYPES, HeadConfig
from mamba_spec_jax.models.heads.keys import check_keys
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel

_LAYER_KEYS = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids")
_FIRST_WINDOW = 28  # of Qwen3's configurations where they do not say


def read_head_config(hf: HFConfig, target: HybridModel) -> HeadConfig:
    """The head that a `config.json` describes; ValueError where it is another target's, or has what heads here lack."""
    config, depth = target.config, len(target.config.layer_types)
    for key, ours, default in (
        ("hidden_size", config.hidden_size, None),
        ("vocab_size", config.vocab_size, None),
        ("target_hidden_size", config.hidden_size, config.hidden_size),
        ("num_target_layers", depth, depth),
    ):
        theirs = hf.integer(key, minimum=1) if default is None or hf.has(key) else default
        if theirs != ours:
            raise ValueError(f"{hf.source} is a head for another model: its {key} is {theirs}, the target's is {ours}")
    check_keys(hf)
    hf.choice("hidden_act", "silu", ["silu"])
    heads = hf.integer("num_attention_heads", minimum=1)
    head_dim = hf.integer("head_dim", config.hidden_size // heads, minimum=1)
    layers = hf.integer("num_hidden_layers", 1, minimum=1)
    layer_types, sliding_window = _windows(hf, layers)
    dflash = dflash_part(hf)
    scale = dflash.number("input_embedding_scale", config.embedding_multiplier)
    fraction = None
    if hf.has("partial_rotary_factor") or rope_parameters(hf).has("partial_rotary_factor"):
        fraction = hf.number("partial_rotary_factor", 1.0, positive=True)
    return HeadConfig(
        hidden_size=config.hidden_size,
        intermediate_size=hf.integer("intermediate_size", minimum=1),
        num_attention_heads=heads,
        num_key_value_heads=hf.integer("num_key_value_heads", heads, minimum=1),
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        target_layers=_target_layers(hf, depth),
        num_layers=layers,
        draft_vocab_size=hf.integer("draft_vocab_size", minimum=1) if hf.has("draft_vocab_size") else None,
        **rotary(hf, head_dim, max_length=2048, fraction=fraction),
        layer_types=layer_types,
        sliding_window=sliding_window,
        is_causal=hf.flag("is_causal") if hf.has("is_causal") else None,
        norm_before_residual=hf.flag("norm_before_residual", False),
        norm_eps=hf.number("rms_norm_eps", 1e-6, positive=True),
        embedding_multiplier=scale,
        logits_divisor=(
            1 / dflash.number("output_multiplier", positive=True)
            if dflash.has("output_multiplier")
            else config.logits_divisor
        ),
    )


def config_values(config: HeadConfig, architecture: str) -> dict[str, Any]:
    """What `config.json` holds of a head; what a DFlash head's block is like is left to the caller."""
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama" if architecture == "LlamaForCausalLMEagle3" else "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    if architecture == "DFlashDraftModel":
        values["dflash_config"] = {"target_layer_ids": list(config.target_layers)}
    else:
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.target_layers)}
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    if config.layer_types:
        values |= {"layer_types": list(config.layer_types), "sliding_window": config.sliding_window}
        values["use_sliding_window"] = config.sliding_window is not None
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    if config.norm_before_residual:
        values["norm_before_residual"] = True
    if config.rotary_dim is not None:
        values["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        values["rope_scaling"] = {"rope_type": scaling.rope_type, **dataclasses.asdict(scaling)}
    return values


def dflash_part(hf: HFConfig) -> HFConfig:
    """What `dflash_config` says, and the file beside it where that is silent."""
    nested = hf.nested("dflash_config")
    return HFConfig({**hf.values, **nested.values}, nested.source if nested.values else hf.source)


def _windows(hf: HFConfig, layers: int) -> tuple[tuple[str, ...], int | None]:
    """The layers' types and their window, as Qwen3's configurations mean them."""
    window = hf.integer("sliding_window", minimum=1) if hf.has("sliding_window") else None
    slides = hf.flag("use_sliding_window") if hf.has("use_sliding_window") else None
    if hf.has("layer_types"):
        types = hf.choices("layer_types", LAYER_TYPES)
    elif slides and window is not None:
        first = hf.integer("max_window_layers", _FIRST_WINDOW, minimum=0)
        types = tuple(LAYER_TYPES[i >= first] for i in range(layers))
    else:
        types = ()
    if "sliding_attention" not in types:
        return (), None
    if slides is False:
        raise hf.refusal("use_sliding_window", "true, or layer_types without sliding_attention")
    return types, window


def _target_layers(hf: HFConfig, depth: int) -> tuple[int, ...]:
    """Layers of the target whose outputs are read; without a word on them, an early, a middle and a late one."""
    for key in _LAYER_KEYS:
        for named in (hf.nested("dflash_config"), hf.nested("eagle_config"), hf):
            if named.has(key):
                layers = named.token_ids(key, None)
                if not layers or max(layers) >= depth:
                    raise named.refusal(key, f"layers of the target, 0..{depth - 1}")
                return layers
    if depth < 6:
        raise ValueError(f"{hf.source} names no layers of the target, and the usual ones need at least 6, not {depth}")
    return (1, depth // 2 - 1, depth - 4)
