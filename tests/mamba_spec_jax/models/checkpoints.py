"""Small checkpoints to load and to damage: a configuration, weights of the right shapes, and the folder they lie in."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mamba_spec_jax.models.families import config_from_hf, granitemoehybrid
from mamba_spec_jax.models.hybrid_lm import HybridModel

CONFIG: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_attention_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 10,
    "mamba_n_heads": 4,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "eos_token_id": [3, 5],
}

Weights = dict[str, np.ndarray]


def stored_shapes(model: HybridModel) -> dict[str, tuple[int, ...]]:
    """Every weight of a granitemoehybrid checkpoint, in the shape it is stored in."""
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(model.abstract_params())}
    return {
        weight.name: weight.layout.stored_shape(shapes[weight.path])
        for weight in granitemoehybrid.weights(model.config)
        if weight.copy_of is None
    }


def random_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    """Every weight of `config`, in the shape it is stored in; exact in bfloat16."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.3, shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in stored_shapes(HybridModel.create(config_from_hf(config))).items()
    }


def write(folder: Path, config: dict[str, Any], weights: Weights, *, shards: int = 1) -> Path:
    """The folder as Hugging Face lays it out: one weights file, or several and their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
