"""Writes what transformers computes where rotary embeddings are scaled; a part of `make_goldens.py`."""

import json
import pathlib
import tempfile
from typing import Any

import family_goldens
import numpy as np
import rotary_cases
import torch
import weights
from rotary_cases import LENGTH, ORIGINAL
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

# A scaling that moves no logit further than this would show nothing.
LEAST_EFFECT = 1e-2


def write_frequencies(out: pathlib.Path) -> None:
    """`frequencies.json`: of every family and kind, what texts of ORIGINAL and of LENGTH tokens are rotated by."""
    out.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {}
    for family, half in rotary_cases.HALVES.items():
        table[family] = {}
        for kind in rotary_cases.rope_parameters(half):
            config = AutoConfig.for_model(family, **rotary_cases.config(family, kind))
            base = AutoModelForCausalLM.from_config(config).base_model
            found = {"config": json.loads(config.to_json_string(use_diff=False))}
            for tokens in (ORIGINAL, LENGTH):
                base.rotary_emb(torch.zeros(1), torch.arange(tokens)[None])
                frequencies = [float(value) for value in base.rotary_emb.inv_freq]
                found[str(tokens)] = {"frequencies": frequencies, "magnitude": float(base.rotary_emb.attention_scaling)}
            keys = ("model_type", *rotary_cases.config(family, kind), "rope_parameters")
            found["config"] = {key: found["config"][key] for key in keys if key in found["config"]}
            table[family][kind] = found
    (out / "frequencies.json").write_text(json.dumps(table, sort_keys=True) + "\n")


def write_case(case: rotary_cases.RotaryCase, out: pathlib.Path) -> dict[str, Any]:
    """The golden of one model: logits of a long text, and of its beginning alone; returns a line of the table."""
    config = AutoConfig.for_model(case.family, **rotary_cases.config(case.family, case.kind))
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            saved = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, not a dict
        shapes = family_goldens.as_released(saved)
        drawn = weights.draw_all(shapes, case.seed, False, case.family)
        save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
        tokens = np.random.default_rng(case.seed).integers(0, config.vocab_size, (2, LENGTH))
        # A model of its own for each: what one has read can change the frequencies of the next.
        short, long = (
            family_goldens.full_forward(family_goldens.load(folder), tokens[:, :length])
            for length in (ORIGINAL, LENGTH)
        )
        stored = json.loads((folder / "config.json").read_text())
        plain = stored | {
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
        }
        (folder / "config.json").write_text(json.dumps(plain))
        effect = float(np.abs(family_goldens.full_forward(family_goldens.load(folder), tokens) - long).max())
    if effect < LEAST_EFFECT:
        raise RuntimeError(f"{case.name}: the scaling moves logits by {effect:.1e} only; choose other parameters")
    np.savez_compressed(
        out / f"{case.name}.npz",
        tokens=tokens.astype(np.int32),
        short=short,
        long=long,
        seed=np.int64(case.seed),
        config=np.array(json.dumps(stored, sort_keys=True)),
        shapes=np.array(json.dumps(shapes)),
        weights_sha256=np.array(weights.digest(drawn)),
    )
    return {"rotary": case.name, "effect": f"{effect:.2f}", "logits std": f"{long.std():.2f}"}
