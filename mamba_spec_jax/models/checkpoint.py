"""A checkpoint in Hugging Face's form: its folder, its JSON files, and its safetensors weights."""

import contextlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open

from mamba_spec_jax.cache.memory import format_bytes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
FILES = (*CONFIGS, *_TEXTS, "model*.safetensors", _INDEX)
# How the names of buffers end that some files hold beside the weights, and that are computed from the configuration:
# frequencies of rotary embeddings, masks, multipliers.
CONSTANTS = (
    "inv_freq", "cos_cached", "sin_cached", ".position_ids", ".masked_bias", "attention.bias", "attn.bias",
    ".mup_vector",
)  # fmt: skip
# Above what published checkpoints have, and small enough to be parsed in a second.
_MOST_BYTES = {"tokenizer.json": 2**26, "tokenizer_config.json": 2**24, _INDEX: 2**25}
_MOST_BYTES_OF_OTHERS = 2**22
_MOST_CONTAINERS = 200_000  # in a JSON file
_MOST_HEADER = 2**25  # bytes that describe the weights of a safetensors file
_SUFFIX = ".safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
# Reading maps a file into memory, where what was read stays until the file is closed. Files are closed whenever this
# part of all weights has been read, so that at most this part is in memory twice.
_MAPPED_PART = 1 / 32


def locate(
    name_or_folder: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    files: Sequence[str] = FILES,
) -> Path:
    """The folder of a checkpoint: itself, or that of a hub model, of which `files` are downloaded.

    Args:
        name_or_folder: a folder, or a hub id such as `ibm-granite/granite-4.0-h-350m`.
        revision: branch, tag or commit on the hub.
        local_files_only: use what an earlier call downloaded.
        files: names and patterns; all that loading reads by default, never anything but JSON and safetensors.
    """
    # An empty name is the current folder to `Path`, which nobody means.
    if not isinstance(name_or_folder, str | os.PathLike) or not str(name_or_folder).strip():
        raise ValueError(f"a checkpoint's name came as {name_or_folder!r}, expected a folder or a hub id")
    folder = Path(name_or_folder).expanduser()
    if folder.is_dir():
        return folder
    name = str(name_or_folder)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"{name} is not a folder")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, local_files_only=local_files_only, allow_patterns=list(files)
            )
        )
    except HFValidationError as error:
        raise ValueError(f"{name} is neither a folder nor a hub id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{name} is not a folder, and the hub did not give it: {reason}") from error


def read_json(path: Path) -> Any:
    """A parsed JSON file; ValueError if it is absent, not JSON, or larger or deeper than any honest one."""
    text = read_text(path)
    # Brackets inside strings are counted too: an honest file has few of either.
    if sum(map(text.count, "[{")) > _MOST_CONTAINERS:
        raise ValueError(f"{path} has more than {_MOST_CONTAINERS} lists and objects, which no checkpoint needs")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_text(path: Path) -> str:
    """A file's text; ValueError if it is absent, not a regular file, too large, or not UTF-8."""
    most = check_file(path)
    with path.open("rb") as file:
        content = file.read(most + 1)  # a file may say that it is empty and never end
    if len(content) > most:
        raise ValueError(f"{path} is larger than {format_bytes(most)}, the most that such a file may have")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def check_file(path: Path) -> int:
    """The most bytes a file of this name may have; ValueError if there is none, or it is larger or not a regular file.

    Nothing is opened: opening a pipe would wait for its writer.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a directory, pipe or device, expected a regular file")
    most = _MOST_BYTES.get(path.name, _MOST_BYTES_OF_OTHERS)
    if status.st_size > most and path.suffix != _SUFFIX:
        raise ValueError(
            f"{path} has {format_bytes(status.st_size)}, but such a file may have {format_bytes(most)} at most"
        )
    return most


class WeightFiles:
    """The weights of a folder's safetensors files.

    Attributes:
        shapes: name to shape of every stored weight, from the files' headers; CONSTANTS are none.
    """

    def __init__(self, paths: Iterable[Path], dtypes: Sequence[str] = FLOATS):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._path: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._mapped = 0
        total = 0
        for path in paths:
            file = _open(path)
            total += path.stat().st_size
            for name in file.keys():  # noqa: SIM118, not a dict
                if name.endswith(CONSTANTS):
                    continue
                stored = file.get_slice(name)
                _check_dtype(path, name, stored.get_dtype(), dtypes)
                if name in self.shapes:
                    raise ValueError(f"{path}: {name} is in another file too")
                self._path[name] = path
                self.shapes[name] = tuple(stored.get_shape())
        self._most_mapped = total * _MAPPED_PART

    def read(self, name: str) -> np.ndarray:
        """One weight, as stored."""
        path = self._path[name]
        if path not in self._open:
            self._open[path] = _open(path)
        value = self._open[path].get_tensor(name)
        self._mapped += value.nbytes
        if self._mapped > self._most_mapped:
            self.close()
        return value

    def close(self) -> None:
        """Gives back what reading has mapped; reading goes on as if nothing had happened."""
        self._open.clear()
        self._mapped = 0


@contextlib.contextmanager
def open_weights(folder: Path, dtypes: Sequence[str] = FLOATS) -> Iterator[WeightFiles]:
    """The weights of a folder, open for reading; ValueError naming the file that is absent or damaged.

    Args:
        folder: of the checkpoint.
        dtypes: those that are expected, as safetensors spells them.
    """
    with contextlib.closing(WeightFiles(_shards(folder), dtypes)) as files:
        yield files


def _shards(folder: Path) -> Iterator[Path]:
    """The weight files of a folder: the single one, or those that its index names."""
    if (folder / _SINGLE).exists():
        yield folder / _SINGLE
        return
    if not (folder / _INDEX).exists():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = (
            f", only {', '.join(pickles)}: pickled weights can run code and are not read. Save them as safetensors "
            "first, as transformers' save_pretrained does"
            if pickles
            else ""
        )
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}{found}")
    index = read_json(folder / _INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{folder / _INDEX} has no weight_map of weights to file names")
    for name in sorted(set(weight_map.values())):
        if name != Path(name).name:
            raise ValueError(f"{folder / _INDEX} names {name}, expected a file beside it")
        if not (folder / name).exists():
            raise ValueError(f"{folder / _INDEX} names {name}, which does not exist")
        yield folder / name


def _check_dtype(path: Path, name: str, dtype: str, expected: Sequence[str]) -> None:
    if dtype not in expected:
        quantized = " (quantized weights are not read)" if dtype.startswith(("F8", "F4", "I8", "U8")) else ""
        raise ValueError(f"{path}: {name} is {dtype}{quantized}, expected one of {', '.join(expected)}")


def _open(path: Path) -> Any:
    check_file(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _MOST_HEADER:
        raise ValueError(f"{path} has a header of {header} bytes, expected {_MOST_HEADER} at most: it is damaged")
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
