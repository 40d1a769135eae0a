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
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from mamba_spec_jax.cache.memory import require_fits
from mamba_spec_jax.models.chat import ChatTemplate, read_chat_template
from mamba_spec_jax.models.checkpoint import CONFIGS, WeightFiles, check_file, locate, open_weights, read_json
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import family_of
from mamba_spec_jax.models.families.base import Family, Weight
from mamba_spec_jax.models.hf_config import HFConfig
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.placement import Rules, place_all, share
from mamba_spec_jax.models.recurrent_config import Mamba2Config
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ReplayRing, SpeculativeMode
from pallas_kernels.dispatch import Implementation

_LISTED = 4  # names of each kind that a message spells out
_QUANTIZATION_KEYS = ("quant_method", "quant_algo", "format", "fmt")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint, ready to run.

    Attributes:
        model: the static side; `model.config.eos_token_ids` are the tokens that end a text.
        params: the weights, for `model`'s methods.
        tokenizer: from `tokenizer.json`, None if the checkpoint has none.
        folder: where the checkpoint lies.
        chat_template: from `chat_template.jinja` or `tokenizer_config.json`, None if the checkpoint has none.
    """

    model: HybridModel
    params: Any
    tokenizer: Tokenizer | None
    folder: Path
    chat_template: ChatTemplate | None = None

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The token ids of a conversation by the checkpoint's chat template, which writes all special tokens itself.

        Args:
            messages: such as `[{"role": "user", "content": "Hello"}]`.
            **options: as for `ChatTemplate.render`.

        Raises:
            ValueError: there is no chat template or no tokenizer, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.folder} has no chat template: it is not a model to chat with, give it text")
        if self.tokenizer is None:
            raise ValueError(f"{self.folder} has no tokenizer.json, so text cannot be turned into its tokens")
        text = self.chat_template.render(messages, **options)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load(
    name_or_folder: str | Path,
    *,
    policy: DTypePolicy | None = None,
    speculative_mode: SpeculativeMode = SpeculativeMode.DECODE,
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
    replay: ReplayRing = ReplayRing(),  # noqa: B008, frozen
    batch: int | None = None,
    hidden_layers: tuple[int, ...] = (),
    implementation: Implementation | None = None,
    device: Any = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    progress: bool | None = None,
    time_step_limit: tuple[float, float] | None = None,
) -> LoadedModel:
    """Loads `config.json`, safetensors weights and `tokenizer.json`, from a folder or from the Hugging Face hub.

    Weights are read one at a time, the largest first, cast to `policy.params` and placed, so that little more memory
    is needed than they take. Missing, surplus and misshapen ones are found in the files' headers, before any is read.
    Of a hub model the configuration is looked at before the weights are downloaded; no code of it is ever run.

    Args:
        name_or_folder: a folder, or a hub id such as `ibm-granite/granite-4.0-h-350m`.
        policy: dtypes; None is all float32.
        speculative_mode, strategy, replay, batch, hidden_layers, implementation: as for `HybridModel.create`.
        device: a jax device or sharding for the weights; None is the default device.
        mesh: devices that share the weights instead, with Auto axes.
        rules: for a mesh, pairs of a regular expression and a `PartitionSpec`: the first whose expression occurs in a
            parameter's dotted path, such as `layers.0.mixer.in_proj.kernel`, splits it. All others are on every device.
        revision: branch, tag or commit on the hub.
        local_files_only: use what an earlier call downloaded.
        progress: show a progress bar on stderr; None shows it if that is a terminal.
        time_step_limit: clamp of Mamba-2's time steps in every pass; None is what transformers' full forward does,
            which for some families is not what their `config.json` says.

    Raises:
        ValueError: the checkpoint cannot be found, is damaged, or is not what this library can run; says which part.
        MemoryError: the weights cannot fit.
    """
    found: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    _read_config(locate(name_or_folder, files=CONFIGS, **found))  # or gigabytes are downloaded of what is refused then
    folder = locate(name_or_folder, **found)
    family, config = _read_config(folder)
    if time_step_limit is not None:
        if not isinstance(config.recurrent, Mamba2Config):
            raise ValueError(f"load got a time_step_limit, but {folder} has no Mamba-2 layers: leave it out")
        recurrent = dataclasses.replace(config.recurrent, time_step_limit=time_step_limit)
        config = dataclasses.replace(config, recurrent=recurrent)
    model = HybridModel.create(
        config,
        policy,
        speculative_mode=speculative_mode,
        strategy=strategy,
        replay=replay,
        batch=batch,
        hidden_layers=hidden_layers,
        implementation=implementation,
    )
    with open_weights(folder) as files:
        params = _read_params(model, family, files, folder, (device, mesh, rules), progress)
    return LoadedModel(model, params, _read_tokenizer(folder), folder, read_chat_template(folder))


def _read_config(folder: Path) -> tuple[Family, HybridConfig]:
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
    return family, _with_generation_config(family.read_config(hf), folder)


def _with_generation_config(config: HybridConfig, folder: Path) -> HybridConfig:
    """Generation ends where `generation_config.json` says; `config.json` has the say only where that one is silent."""
    path = folder / "generation_config.json"
    if not path.exists():
        return config
    generation = HFConfig(read_json(path), str(path))
    if not generation.has("eos_token_id"):
        return config
    return dataclasses.replace(config, eos_token_ids=generation.token_ids("eos_token_id", None))


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    check_file(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _read_params(
    model: HybridModel, family: Family, files: WeightFiles, folder: Path, where: tuple, progress: bool | None
) -> Any:
    # Before anything is made of each layer and expert: there are as many weights at least.
    least = len(model.config.layer_types)
    if len(files.shapes) < least:
        raise ValueError(f"{folder} has {len(files.shapes)} weights, but {least} layers by its config.json")
    abstract = nnx.to_flat_state(model.abstract_params())
    leaves = {".".join(map(str, path)): leaf for path, leaf in abstract}
    stored = _stored_names(family, files, folder)
    weights = list(family.weights(model.config))
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    check_weights(weights, shapes, {name: files.shapes[stored[name]] for name in stored}, folder)
    places = place_all(shapes, *where)
    sizes = {path: math.prod(leaf.shape) * leaf.dtype.itemsize for path, leaf in leaves.items()}
    needed = sum(math.prod(share(leaf.shape, places[path])) * leaf.dtype.itemsize for path, leaf in leaves.items())
    require_fits(f"{folder}", {"weights": needed}, "a smaller dtype of params in the policy, or a smaller model")

    loaded = {}
    # While a weight is read it is in memory up to three times. The largest first: there is most room for it then.
    weights.sort(key=lambda weight: -sizes[weight.path])
    with _progress_bar(progress) as bar:
        task = bar.add_task("Loading weights", total=sum(sizes.values()))
        for weight in weights:
            path = weight.path
            if weight.copy_of is None:
                value = read_weight(weight, files, stored, leaves[path])
                loaded[path] = jax.block_until_ready(jax.device_put(value, places[path]))
                del value
                bar.advance(task, sizes[path])
            elif weight.name in stored:
                _check_copy(weight, files.read(stored[weight.name]), files.read(stored[weight.copy_of]), folder)
    return nnx.from_flat_state([(path, leaf.replace(loaded[".".join(map(str, path))])) for path, leaf in abstract])


def read_weight(weight: Weight, files: WeightFiles, stored: Mapping[str, str], leaf: Any) -> np.ndarray:
    """A parameter of the shape and dtype of `leaf`, on the host; `stored` is what the files call each weight."""
    sources = [files.read(stored[name]) for name in weight.sources(stored)]
    return _cast(weight.to_parameter(sources, leaf.shape), leaf.dtype, weight.name)


def _progress_bar(wanted: bool | None) -> Progress:
    console = Console(stderr=True)
    hidden = not (console.is_terminal if wanted is None else wanted)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=hidden)


def _stored_names(family: Family, files: WeightFiles, folder: Path) -> dict[str, str]:
    """What the files call each weight that the model may use, by its canonical name."""
    stored: dict[str, str] = {}
    for name in files.shapes:
        if name.startswith(family.unused):
            continue
        canonical = family.canonical(name)
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
