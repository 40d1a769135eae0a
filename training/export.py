"""Writing and reading the model folder in Hugging Face's own format."""

import json
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
from safetensors.flax import load_file, save_file
from tokenizers import Tokenizer

from training.corpus import DOCUMENT_END, DOCUMENT_END_ID
from training.model import Params, TinyConfig


def write_folder(folder: Path, config: TinyConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Writes what transformers needs to load the model as is: two configurations, bf16 weights, the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.astype(jnp.bfloat16) for name, value in sorted(params.items())}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": None, "eos_token_id": DOCUMENT_END_ID, "pad_token_id": DOCUMENT_END_ID}
    _write_json(
        folder / "config.json",
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            **asdict(config),
            "num_hidden_layers": len(config.layer_types),
            "intermediate_size": config.shared_intermediate_size,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "position_embedding_type": "nope",
            "max_position_embeddings": 2048,
            "initializer_range": 0.0625,
            "tie_word_embeddings": True,
            "use_cache": True,
            "dtype": "bfloat16",
            **ends,
        },
    )
    _write_json(folder / "generation_config.json", {**ends, "do_sample": True, "temperature": 0.7})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": DOCUMENT_END,
            "pad_token": DOCUMENT_END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
        },
    )


def read_folder(folder: Path) -> tuple[TinyConfig, Params, Tokenizer]:
    """The configuration, the bf16 weights widened to fp32, and the tokenizer of a folder."""
    params = {name: value.astype(jnp.float32) for name, value in load_file(folder / "model.safetensors").items()}
    return TinyConfig.load(folder), params, Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
