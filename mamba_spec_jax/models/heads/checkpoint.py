"""Draft heads on disk, as published EAGLE-3 and DFlash checkpoints are: `config.json` and safetensors.

The modules' parts bear the names of the stored weights, so reading and writing only turns linear layers around.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mamba_spec_jax.array_types import Array
from mamba_spec_jax.models.checkpoint import FLOATS, WeightFiles, locate, open_weights, read_json
from mamba_spec_jax.models.heads.config import HeadConfig
from mamba_spec_jax.models.heads.config_file import config_values, dflash_part, read_head_config
from mamba_spec_jax.models.heads.dflash import DFlash
from mamba_spec_jax.models.heads.eagle import Eagle3, MultiTokenPrediction
from mamba_spec_jax.models.heads.head import DFlashHead, DraftHead, EagleHead, HeadModule
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel

# `architectures` of config.json: the module, and its static side.
ARCHITECTURES: Mapping[str, tuple[type[nnx.Module], type[DraftHead]]] = {
    "LlamaForCausalLMEagle3": (Eagle3, EagleHead),
    "MultiTokenPrediction": (MultiTokenPrediction, EagleHead),
    "DFlashDraftModel": (DFlash, DFlashHead),
}
_EMBEDDING = "embed_tokens.weight"
_DTYPES = (*FLOATS, "I64", "I32", "BOOL")


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A head's checkpoint, ready to run on one target.

    Attributes:
        head: the static side.
        params: the head's weights, bound to the target's embedding and output projection.
        block_size: tokens of the block that a DFlash head was trained to fill, its first one included; else None.
        mask_token: marks a position to be filled; None for heads that fill none.
        passes: in how many a DFlash head was trained to fill its block.
    """

    head: DraftHead
    params: Any
    block_size: int | None = None
    mask_token: int | None = None
    passes: int = 1


def load_head(
    name_or_folder: str | Path,
    target: HybridModel,
    target_params: Any,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
) -> LoadedHead:
    """Loads a draft head for a target.

    Args:
        name_or_folder: a folder, or a hub id.
        target: the model it drafts for, whose dtypes it takes.
        target_params: its weights; the head borrows the embedding, and the output projection if it has none.
        revision, local_files_only: as for `load`.

    Raises:
        ValueError: the checkpoint is damaged, of an unknown kind, or was made for another target; says which part.
    """
    folder = locate(name_or_folder, revision=revision, local_files_only=local_files_only)
    hf = HFConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    (architecture, *_) = hf.choices("architectures", ARCHITECTURES)
    module, static = ARCHITECTURES[architecture]
    head = static.create(module, read_head_config(hf, target), target.policy)
    embedding, output = _borrowed(target, target_params)
    with open_weights(folder, _DTYPES) as files:
        params = _read(head, module, files, folder)
        if _EMBEDDING in files.shapes:
            output = embedding.T if output is None else output
            embedding = jnp.asarray(files.read(_EMBEDDING), target.policy.params)
    dflash = dflash_part(hf)
    return LoadedHead(
        head,
        head.bind(params, embedding, output),
        block_size=dflash.integer("block_size", minimum=2) if module is DFlash else None,
        mask_token=dflash.integer("mask_token_id", minimum=0) if module is DFlash else None,
        passes=dflash.integer("passes", 1, minimum=1),
    )


def save_head(
    folder: Path,
    module: nnx.Module,
    config: HeadConfig,
    *,
    block_size: int | None = None,
    mask_token: int | None = None,
    passes: int = 1,
) -> None:
    """Writes a head as `load_head` reads it: bf16 weights and `config.json`.

    Args:
        folder: made if it does not exist.
        module: an `Eagle3`, `MultiTokenPrediction` or `DFlash`.
        config: what it is.
        block_size, mask_token, passes: of a DFlash head; published ones know of one pass only.
    """
    architecture = next(name for name, (kind, _) in ARCHITECTURES.items() if isinstance(module, kind))
    values = config_values(config, architecture)
    if architecture == "DFlashDraftModel":
        values["block_size"] = block_size
        values["dflash_config"] |= {"mask_token_id": mask_token} | ({} if passes == 1 else {"passes": passes})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    save_file(
        {_stored_name(path): _to_stored(path, leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(module))},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def _borrowed(target: HybridModel, params: Any) -> tuple[Array, Array | None]:
    """The target's embedding `[V, D]`, and its output projection `[D, V]` if that is another matrix."""
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    output = None if target.config.tie_embeddings else flat["lm_head.kernel"][...]
    return flat["embed_tokens.embedding"][...], output


def _read(head: DraftHead, module: HeadModule, files: WeightFiles, folder: Path) -> Any:
    abstract = nnx.to_flat_state(nnx.split(nnx.eval_shape(lambda: module(head.config, head.policy, nnx.Rngs(0))))[1])
    shapes = {_stored_name(path): _turned_shape(path, leaf.shape) for path, leaf in abstract}
    problems = [f"{name} is missing" for name in shapes if name not in files.shapes]
    problems += [f"{name} is surplus" for name in files.shapes if name not in (*shapes, _EMBEDDING)]
    shapes[_EMBEDDING] = (head.config.vocab_size, head.config.hidden_size)  # may be stored
    problems += [
        f"{name} is {list(files.shapes[name])}, expected {list(shape)}"
        for name, shape in shapes.items()
        if files.shapes.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(f"the weights of {folder} do not fit its config.json: {'; '.join(problems)}")

    def weight(path, leaf):
        value = files.read(_stored_name(path))
        return leaf.replace(jnp.asarray(value.T if path[-1] == "kernel" else value).astype(leaf.dtype))

    return nnx.from_flat_state([(path, weight(path, leaf)) for path, leaf in abstract])


def _stored_name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path)).replace(".kernel", ".weight")


def _turned_shape(path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if path[-1] == "kernel" else shape


def _to_stored(path: tuple[Any, ...], value: Array) -> np.ndarray:
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return np.asarray(value, np.int64 if jnp.issubdtype(value.dtype, jnp.integer) else bool)
    return np.ascontiguousarray(np.asarray(value.T if path[-1] == "kernel" else value, jnp.bfloat16))
