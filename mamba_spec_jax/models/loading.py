"""Loading a published checkpoint: checked against its configuration first, then read weight by weight."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from mamba_spec_jax.cache.memory import require_fits
from mamba_spec_jax.models.checkpoint import WeightFiles, check_file, read_json
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import family_of
from mamba_spec_jax.models.families.base import Family, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.placement import place_all, share
from mamba_spec_jax.progress_bar import BYTES, progress_bar

_LISTED = 4  # names of each kind that a message spells out
_QUANTIZATION_KEYS = ("quant_method", "quant_algo", "format", "fmt")


def read_config(folder: Path) -> tuple[Family, HybridConfig]:
    """What the JSON files say; ValueError if it is nothing that can be run."""
    hf = HFConfig(read_json(folder / "config.json"), str(folder / "config.json"))
    family = family_of(hf)
    quantized = hf.nested("quantization_config")
    separate = folder / "hf_quant_config.json"
    if not quantized.values and separate.exists():
        quantized = HFConfig(read_json(separate), str(separate)).nested("quantization")
    if quantized.values:
        names = [str(quantized.values[key]) for key in _QUANTIZATION_KEYS if quantized.has(key)] or ["unknown format"]
        raise ValueError(
            f"{folder} is quantized ({', '.join(names)}), expected a checkpoint of plain floating-point weights"
        )
    return family, _with_generation_config(family.config(hf), folder)


def _with_generation_config(config: HybridConfig, folder: Path) -> HybridConfig:
    """Generation ends where `generation_config.json` says; `config.json` has the say only where that one is silent."""
    path = folder / "generation_config.json"
    if not path.exists():
        return config
    generation = HFConfig(read_json(path), str(path))
    if not generation.has("eos_token_id"):
        return config
    return dataclasses.replace(config, eos_token_ids=generation.token_ids("eos_token_id", None))


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in `tokenizer.json`, None if there is none.

    The length that a file may ask to cut or pad texts to is for training; a prompt is read whole.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_params(
    model: HybridModel, family: Family, files: WeightFiles, folder: Path, where: tuple, progress: bool | None
) -> Any:
    """The weights of `model` from `files`; `where` is the device, mesh and rules of `place_all`."""
    # Before anything is made of each layer and expert: there are as many weights at least.
    least = len(model.config.layer_types)
    if len(files.shapes) < least:
        raise ValueError(f"{folder} has {len(files.shapes)} weights, but {least} layers by its config.json")
    abstract = nnx.to_flat_state(model.abstract_params())
    leaves = {".".join(map(str, path)): leaf for path, leaf in abstract}
    weights = list(family.weights(model.config))
    stored = _stored_names(family, weights, files, folder)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    check_weights(weights, shapes, {name: files.shapes[stored[name]] for name in stored}, folder)
    places = place_all(shapes, *where)
    sizes = {path: math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in leaves.items()}
    needed = sum(math.prod(share(leaf.shape, places[path])) * leaf.dtype.itemsize for path, leaf in leaves.items())
    require_fits(f"{folder}", {"weights": needed}, "a smaller dtype of params in the policy, or a smaller model")

    loaded = {}
    # While a weight is read it is in memory up to three times. The largest first: there is most room for it then.
    weights.sort(key=lambda weight: -sizes[weight.path])
    with progress_bar("Loading weights", sum(sizes.values()), BYTES, progress) as bar:
        for weight in weights:
            path = weight.path
            if weight.copy_of is None:
                value = read_weight(weight, files, stored, leaves[path])
                loaded[path] = jax.block_until_ready(jax.device_put(value, places[path]))
                del value
                bar.advance(sizes[path])
            elif weight.name in stored:
                _check_copy(weight, files.read(stored[weight.name]), files.read(stored[weight.copy_of]), folder)
    return nnx.from_flat_state([(path, leaf.replace(loaded[".".join(map(str, path))])) for path, leaf in abstract])


def read_weight(weight: Weight, files: WeightFiles, stored: Mapping[str, str], leaf: Any) -> np.ndarray:
    """A parameter of the shape and dtype of `leaf`, on the host; `stored` is what the files call each weight."""
    sources = [files.read(stored[name]) for name in weight.sources(stored)]
    return _cast(weight.to_parameter(sources, leaf.shape), leaf.dtype, weight.name)


def _stored_names(family: Family, weights: Sequence[Weight], files: WeightFiles, folder: Path) -> dict[str, str]:
    """What the files call each weight that the model may use, by its canonical name."""
    stored: dict[str, str] = {}
    embedding = next(weight.name for weight in weights if weight.path == "embed_tokens.embedding")
    try:
        names = family.canonical_names(tuple(files.shapes), embedding)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    for name, canonical in names.items():
        if canonical in stored:
            raise ValueError(f"{folder} has one weight under two names: {stored[canonical]} and {name}")
        stored[canonical] = name
    return stored


def check_weights(
    weights: Sequence[Weight],
    shapes: dict[str, tuple[int, ...]],
    found: dict[str, tuple[int, ...]],
    folder: Path,
) -> None:
    """Raises ValueError naming every kind of difference between the weights a model needs and those found."""
    expected = {
        name: shape for weight in weights for name, shape in weight.source_shapes(shapes[weight.path], found).items()
    }
    copies = {weight.name for weight in weights if weight.copy_of is not None}
    missing = [name for name in expected if name not in found and name not in copies]
    surplus = [name for name in found if name not in expected]
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    kinds = (("missing", missing), ("surplus", surplus), ("misshapen", misshapen))
    problems = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds if names]
    if problems:
        raise ValueError(f"the weights of {folder} do not fit its config.json: {'; '.join(problems)}")


def _check_copy(weight: Weight, value: np.ndarray, original: np.ndarray, folder: Path) -> None:
    if not np.array_equal(value, original):
        raise ValueError(f"{folder}: config.json says that {weight.name} is {weight.copy_of}, but they differ")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _cast(value: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):  # refused below, by name
        cast = np.ascontiguousarray(value, dtype)
    if jnp.finfo(dtype).max < jnp.finfo(value.dtype).max and not np.isfinite(cast).all():
        raise ValueError(f"{name} has values that {dtype} cannot hold: choose a policy with wider params")
    return cast
