"""Changes every key of config_keys.json in tiny models, and compares our logits with transformers'.

    python config_sweep.py [--out FILE] [TYPE ...]

Run with the `oracles` dependency group, from the repository's root with PYTHONPATH=$PWD; some minutes for each type.
Writes config_effects.json: for each type, the keys that transformers' logits depend on, those that they do not (every
value tried gives the same bits), and those of which transformers accepts no other value. Exits with 1 where a value is
accepted here and the logits are others than transformers', or refused here though transformers' logits ignore it.
"""

import argparse
import copy
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import config_keys
import family_goldens
import jax
import numpy as np
import torch
import weights
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from mamba_spec_jax import load
from mamba_spec_jax.models.families import config_from_hf

HERE = pathlib.Path(__file__).resolve().parent
TOKENS = np.random.default_rng(3).integers(0, 31, (1, 12))
TOLERANCE = 1e-4
INFINITY = {"__float__": "Infinity"}
# The models to change, as stored for the goldens.
BASES = {
    "granitemoehybrid": ("moe",),
    "qwen3_5": ("qwen3_5_text/switches",),
    "qwen3_5_moe": ("qwen3_5_moe_text/switches",),
}
# Values to try of keys whose present value does not suggest any.
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["swish", "gelu", "relu"],
    "mamba_hidden_act": ["swish", "gelu"],
    "mlp_hidden_act": ["swish", "gelu", "relu", "silu", "relu2"],
    "time_step_limit": [[0.01, 0.05], [0.0, INFINITY]],
    "mamba_dt_limit": [[0.01, 0.05]],
    "mamba_dt_min": [0.3],
    "mamba_dt_max": [0.3],
    "mamba_dt_init_floor": [0.3],
    "time_step_min": [0.3],
    "mamba_chunk_size": [5],
    "mamba_n_groups": [1, 3],
    "n_groups": [1, 3],
    "mamba_d_conv": [2, 4],
    "mamba_expand": [1, 4],
    "mamba_conv_bias": [True, False],
    "num_key_value_heads": [None, 1, 2, 3, 4, 6],
    "num_local_experts": [2, 4],
    "num_experts": [2, 4],
    "head_dim": [None, 4, 16],
    "attention_head_dim": [4, 16],
    "q_lora_rank": [None, 4],
    "moe_latent_size": [None, 4],
    "attn_layer_indices": [[0, 2], None, []],
    "full_attn_idxs": [[1], None],
    "mamba_d_ssm": [None, 30],
    "mamba_d_head": ["auto", 4],
    "mamba_dt_rank": ["auto", 3],
    "time_step_rank": ["auto", 3],
    "position_embedding_type": [None, "rope", "nope"],
    "sliding_window": [None, 2],
    "mlp_only_layers": [[], [0], None],
    "n_group": [2],
    "num_expert_group": [2],
    "topk_group": [1, 3],
    "linear_attn_config": [
        {},
        {"head_dim": 8, "num_heads": 3},
        {"short_conv_kernel_size": 3},
        {"full_attn_layers": [2], "kda_layers": [1, 3, 4]},
    ],
    "first_k_dense_replace": [0, 2],
    "full_attention_interval": [2],
    "hybrid_override_pattern": ["M*-E", "MM*-"],
    "mtp_hybrid_override_pattern": ["*"],
    "mtp_layers_block_type": [["full_attention"]],
    "hybrid_layer_ids": [[0, 1]],
    "per_layer_config": [{"0": {"rms_norm_eps": 0.5}}],
    "is_causal": [False],
    "is_encoder_decoder": [True],
    "chunk_size_feed_forward": [2],
    "num_labels": [5],
    "problem_type": ["regression"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "rope_theta": [500.0],
    "partial_rotary_factor": [1.0, 0.5, 0.25],
    "rope_scaling": [None, {"rope_type": "default", "rope_theta": 300.0}, {"type": "default"}],
    "rope_parameters": [
        None,
        {},
        {"rope_type": "default"},
        {"rope_theta": 7.0},
        {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
    ],
    "eos_token_id": [[2, 3], None],
    "dtype": ["float32"],
    "torch_dtype": ["float32", "bfloat16"],
    "mamba_ssm_cache_dtype": ["bfloat16"],
    "architectures": [["Other"]],
    "attn_implementation": ["eager"],
    "experts_implementation": ["eager"],
    "name_or_path": ["x"],
    "num_hidden_layers": [2, 3, 4, 5],
    "qk_rope_head_dim": [4],
    "intermediate_size": [None, 16],
    "block_ff_dim": [30],
    "block_ffn_dim_multiplier": [None, 0.7],
    "tie_embedding": [True, False],
    "linear_num_key_heads": [None, 1, 2],
    "linear_num_value_heads": [None, 2, 4],
    "linear_key_head_dim": [None, 4],
    "linear_value_head_dim": [None, 4],
}
VALUES["layer_types"] = VALUES["layers_block_type"] = [None, "reversed", "legacy"]
LEGACY = {"linear_attention": "mamba", "full_attention": "attention"}
# Keys that decide only where another is absent.
WITHOUT = {
    "full_attention_interval": ["layer_types"],
    "full_attn_idxs": ["layer_types"],
    "hybrid_override_pattern": ["layers_block_type"],
    "linear_attn_config": ["layer_types"],
    "first_k_dense_replace": ["mlp_layer_types"],
    "rope_theta": ["rope_parameters"],
    "partial_rotary_factor": ["rope_parameters"],
}
# Keys that decide only beside others.
YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}}
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    (model_type, "max_position_embeddings"): YARN
    for model_type in ("bamba", "falcon_h1", "lfm2", "olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
} | {
    ("zamba2", "use_long_context"): YARN | {"use_mem_rope": True},
    ("zamba2", "max_position_embeddings"): YARN | {"use_mem_rope": True},
    ("granitemoehybrid", "rope_parameters"): {"position_embedding_type": "rope"},
    ("granitemoehybrid", "rope_theta"): {"position_embedding_type": "rope", "rope_parameters": None},
    ("granitemoehybrid", "rope_scaling"): {"position_embedding_type": "rope"},
    ("granitemoehybrid", "max_position_embeddings"): YARN | {"position_embedding_type": "rope"},
}


def patches(model_type: str, config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(key, what to set, the model to change)"""
    known = {part: config_keys.keys_of(model_type)[part] for part in ("fields", "aliases", "legacy", "derived")}
    asked = config_keys.keys_of(model_type)["asked_by_the_model"] + config_keys.keys_of(model_type)["properties"]
    common = config_keys.base_keys()
    general = [*common["fields"], *common["legacy"], *common["asked_by_the_mask"]]
    for key in dict.fromkeys([*known["fields"], *known["aliases"], *known["aliases"].values(), *known["legacy"],
                              *known["derived"], *asked, *general]):  # fmt: skip
        present = config.get(key, config.get(known["aliases"].get(key)))
        for other, name in known["aliases"].items():
            present = config.get(other) if present is None and name == key else present
        for value in values_of(key, present, config):
            yield key, {key: value}, config
            if key in WITHOUT:
                yield key, {key: value}, {name: config[name] for name in config if name not in WITHOUT[key]}
            winner = known["aliases"].get(key)  # of the two names, where the file has both
            if winner in config:
                renamed = {key if name == winner else name: config[name] for name in config}
                yield key, {key: value}, renamed
            if (model_type, key) in BESIDE:
                yield key, {key: value}, config | BESIDE[model_type, key]
        if (key in known["fields"] and not isinstance(known["fields"][key], int)) or isinstance(present, bool):
            yield key, {}, config


def values_of(key: str, present: Any, config: dict[str, Any]) -> Iterator[Any]:
    for value in VALUES.get(key, []):
        if isinstance(value, str) and value in ("reversed", "legacy"):
            if not isinstance(present, list):
                continue
            value = present[::-1] if value == "reversed" else [LEGACY.get(kind, kind) for kind in present]
        if value != present:
            yield value
    if key in VALUES:
        return
    if isinstance(present, bool):
        yield not present
    elif isinstance(present, int):
        yield from (present + 1, 2 * present)
    elif isinstance(present, float):
        yield from (1.7 * present + 0.01, 0.5 * present + 0.002)
    elif isinstance(present, list) and present and isinstance(present[0], float):
        yield [1.3 * value for value in present]
    elif isinstance(present, list):
        yield present[::-1]
    elif present is None and key not in ("mlp_layer_types", "transformers_version"):
        yield from (3, True)


class Models:
    """Logits `[T, V]` of both libraries for a `config.json`, with weights drawn by rule."""

    def __init__(self, model_type: str, case: str):
        self.model_type, self.case = model_type, case
        self.ours: dict[Any, Any] = {}

    def theirs(self, config: dict[str, Any], folder: pathlib.Path) -> np.ndarray:
        (folder / "config.json").write_text(json.dumps(config))
        parsed = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(parsed).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, not a dict
        drawn = weights.draw_all(family_goldens.as_released(shapes), 100, False, self.model_type)
        save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        model = family_goldens.load(folder)
        return family_goldens.full_forward(model, TOKENS)[0]

    def our(self, folder: pathlib.Path) -> np.ndarray:
        loaded = load(folder, progress=False)
        key = loaded.model.config, weights.digest(load_file(folder / "model.safetensors"))
        if key not in self.ours:
            T = TOKENS.shape[1]
            lengths = np.arange(1, T + 1, dtype=np.int32)
            chunk = np.repeat(TOKENS, T, axis=0).astype(np.int32)
            prefill = jax.jit(loaded.model.prefill, compiler_options={"xla_backend_optimization_level": 0})
            cache = loaded.model.init_cache(T, T)
            output = prefill(loaded.params, chunk, cache, slots=np.arange(T, dtype=np.int32), num_tokens=lengths)
            self.ours[key] = np.asarray(output.logits)
        return self.ours[key]


def sweep(model_type: str, case: str, keys: list[str], found: dict[str, dict[str, str]]) -> int:
    """Fills `found[key][value]` with what came of each of `keys`, or of all; returns how many differ."""
    config = json.loads((HERE / case / "config.json").read_text())
    if model_type != config["model_type"]:  # a vision model's text part
        config = {"model_type": model_type, "text_config": config}
    models, wrong = Models(model_type, case), 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        bases: dict[str, np.ndarray] = {}
        for key, values, model in patches(model_type, config):
            if keys and key not in keys:
                continue
            written = json.dumps(model)
            if written not in bases:
                bases[written] = models.theirs(model, folder)
                difference = float(np.abs(models.our(folder) - bases[written]).max())
                if difference > TOLERANCE:
                    raise RuntimeError(f"{case}: the model to change is itself off by {difference:.1e}: {written}")
            changed = copy.deepcopy(model | values if values else {k: v for k, v in model.items() if k != key})
            label = json.dumps(values.get(key, "absent")) + ("" if model is config else ", in another model")
            effect, here, detail = compared(models, changed, folder, bases[written])
            wrong += here.startswith(("OFF", "NEEDLESSLY"))
            text = f"{effect}; {here}{detail}"
            found.setdefault(key, {})[f"{case}: {label}"] = text
            print(f"{model_type:18} {key} = {label}: {text}", flush=True)
    return wrong


def compared(models: Models, changed: dict[str, Any], folder: pathlib.Path, base: np.ndarray) -> tuple[str, str, str]:
    """What a changed file does to transformers' logits, what this library makes of it, and a message."""
    try:
        theirs = models.theirs(changed, folder)
    except Exception as error:  # whatever transformers raises
        try:
            config_from_hf(changed)
            here = "accepted"
        except ValueError as refusal:
            here = f"refused: {str(refusal)[-110:]}"
        return "transformers refuses", here, f" ({type(error).__name__}: {error}"[:90].replace("\n", " ") + ")"
    effect = "no effect" if np.array_equal(theirs, base) else "effect"
    try:
        difference = float(np.abs(models.our(folder) - theirs).max())
    except ValueError as refusal:
        return effect, "refused" if effect == "effect" else "NEEDLESSLY refused", f": {str(refusal)[-110:]}"
    return effect, "same" if difference < TOLERANCE else f"OFF BY {difference:.1e}", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=list(config_keys.MODEL_TYPES))
    parser.add_argument("--keys", nargs="*", default=[], help="the keys to change; nothing is written then")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "config_effects.json")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    wrong = 0
    for model_type in arguments.types:
        found: dict[str, dict[str, str]] = {}
        for case in BASES.get(model_type, (f"{model_type}/switches",)):
            wrong += sweep(model_type, case, arguments.keys, found)
        if arguments.keys:
            continue
        stored = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        stored[model_type] = {key: effects(found[key]) for key in sorted(found)}
        arguments.out.write_text(json.dumps(dict(sorted(stored.items())), indent=1) + "\n")
    sys.exit(wrong > 0)


def effects(results: dict[str, str]) -> str:
    """What transformers makes of a key."""
    kinds = {text.split(";")[0] for text in results.values()}
    return next((kind for kind in ("effect", "no effect") if kind in kinds), "transformers refuses")


if __name__ == "__main__":
    main()
