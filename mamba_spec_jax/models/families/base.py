"""What a family of checkpoints is: how its configuration reads, and where each of its weights goes."""

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.families import keys
from mamba_spec_jax.models.hf_config import HFConfig

_OUTPUT = "lm_head."  # what the output projection is called in every family


class Layout(enum.Enum):
    """How a stored weight relates to the parameter it becomes."""

    SAME = "same"
    SWAPPED = "swapped"  # the last two axes change places: linear layers, alone or stacked by expert
    DEPTHWISE = "depthwise"  # (C, 1, W) becomes [W, C]
    PER_HEAD = "per head"  # (1, 1, H, 1) becomes [H]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a parameter of `shape` has in the checkpoint."""
        if self is Layout.SWAPPED:
            return (*shape[:-2], shape[-1], shape[-2])
        if self is Layout.DEPTHWISE:
            return (shape[1], 1, shape[0])
        if self is Layout.PER_HEAD:
            return (1, 1, *shape, 1)
        return shape

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        """The parameter, as a view of the stored weight."""
        if self is Layout.SWAPPED:
            return stored.swapaxes(-1, -2)
        if self is Layout.DEPTHWISE:
            return stored[:, 0].T
        if self is Layout.PER_HEAD:
            return stored.reshape(-1)
        return stored


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint.

    Attributes:
        name: what the checkpoint calls it.
        path: the parameter it becomes, dotted.
        layout: how it is stored.
        copy_of: name of the weight that it merely repeats; such a weight may be absent, and must be equal if present.
        parts: names of parts that it may be stored as instead: rows of a matrix, experts of a stack.
        part_rows: how many rows each of them has, where they are not equal.
        even_parts: whether they may be cut as evenly as the rows allow instead, as `torch.chunk` cuts.
        row_order: the row of what is stored that each row of the matrix is, where they come in another order.
    """

    name: str
    path: str
    layout: Layout = Layout.SAME
    copy_of: str | None = None
    parts: tuple[str, ...] = ()
    part_rows: tuple[int, ...] = ()
    even_parts: bool = False
    row_order: tuple[int, ...] = ()

    def sources(self, found: Container[str]) -> tuple[str, ...]:
        """Names of what is to be read."""
        return self.parts if self.parts and self.name not in found else (self.name,)

    def source_shapes(self, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shape that each source of a parameter of `shape` has; `found` are the shapes of what there is."""
        stored, sources = self.layout.stored_shape(shape), self.sources(found)
        if sources == (self.name,):
            return {self.name: stored}
        row = stored[1:] if self.layout is Layout.DEPTHWISE else stored[-1:] if len(stored) > 1 else ()
        total = math.prod(stored) // math.prod(row)
        rows = self.part_rows or (total // len(sources),) * len(sources)
        if self.even_parts:
            most = -(-total // len(sources))
            even = tuple(min(most, total - start) for start in range(0, total, most))
            rows = even if all(found.get(name) == (n, *row) for name, n in zip(sources, even, strict=False)) else rows
        return {name: (n, *row) for name, n in zip(sources, rows, strict=True)}

    def to_parameter(self, sources: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The parameter of `shape`; a view where it is stored whole and in order."""
        whole = sources[0] if len(sources) == 1 else np.concatenate(sources)
        whole = whole.reshape(self.layout.stored_shape(shape))
        return self.layout.to_parameter(whole[np.array(self.row_order)] if self.row_order else whole)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The head for multi-token prediction that checkpoints of a family may carry, as weights named `mtp.`.

    Attributes:
        config: the layers of the head, as those of a model, from `config.json` and the target that it describes.
        weights: every weight of a head with such layers.
    """

    config: Callable[[HFConfig, HybridConfig], HybridConfig]
    weights: Callable[[HybridConfig], Iterable[Weight]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint, as its `model_type` names it.

    Attributes:
        read_config: the model that the keys describe, under the names that `config` gives them.
        aliases: pairs (another name of a key, the name that `read_config` reads); a value under the first is the one
            that counts, as in transformers.
        without_effect: keys that transformers knows and that change no logits, beside `keys.WITHOUT_EFFECT`.
        only: keys that may have no other values than these, the default first, beside `keys.ONLY`.
        weights: every weight that a checkpoint of that model has.
        text: the part of a `config.json` that describes the language model.
        base: how the names in `weights` begin that belong to the model without its output projection.
        renames: pairs (part of an older name, what it is called in `weights`).
        unused: how the names of weights begin that a checkpoint may have and the model has no use for.
        prediction: the head that its checkpoints may carry, None if that is unknown.
    """

    read_config: Callable[[HFConfig], HybridConfig]
    weights: Callable[[HybridConfig], Iterable[Weight]]
    text: Callable[[HFConfig], HFConfig] = lambda hf: hf
    aliases: tuple[tuple[str, str], ...] = ()
    without_effect: frozenset[str] = frozenset()
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    base: str = "model."
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    prediction: Prediction | None = None

    def config(self, hf: HFConfig) -> HybridConfig:
        """The model that a `config.json` describes; ValueError naming the key that cannot be honoured."""
        hf = self.text(hf).renamed(self.aliases)
        for key, values in (keys.ONLY | self.only).items():
            if key not in self.without_effect:
                hf.choice(key, values[0], values)
        return self.read_config(hf)

    def canonical(self, name: str) -> str:
        """The name that `weights` uses for a stored weight."""
        for old, new in self.renames:
            name = name.replace(old, new)
        return name

    def canonical_names(self, names: Sequence[str], embedding: str) -> dict[str, str]:
        """Every stored name that the model may have a use for, and the name that `weights` uses for it.

        Files of the model without its output projection lack `base`, and wrappers of the module put their own names
        before it, such as `base_model.model.` or `language_model.`. Where the embedding is tells what there is.

        Args:
            names: of all stored weights.
            embedding: the name that `weights` uses for the embedding.

        Raises:
            ValueError: there are several embeddings, by their names.
        """
        names = [name for name in names if not name.startswith(self.unused)]
        short = {name: name for name in names}
        found = sorted(name for name in names if self.canonical(self.base + _last_two(name)) == embedding)
        if len(found) > 1:
            raise ValueError(f"there are several embeddings, expected one: {', '.join(found)}")
        if found:
            common = len(_common_parts(names))
            before = found[0][common:].removesuffix(_last_two(found[0]))
            short = {name: self._rebased(name[common:], before) for name in names}
        named = {name: self.canonical(rest) for name, rest in short.items()}
        return {name: canonical for name, canonical in named.items() if not canonical.startswith(self.unused)}

    def _rebased(self, name: str, before: str) -> str:
        """The name with `base` in the place of what is before the embedding's."""
        outer, _, last = before.removesuffix(".").rpartition(".")
        wrapper = f"{outer}." if outer and self.canonical(f"{last}.") == self.base else ""
        if name.startswith(f"{wrapper}{_OUTPUT}"):
            return name.removeprefix(wrapper)
        return self.base + name.removeprefix(before) if name.startswith(before) else name


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _common_parts(names: Sequence[str]) -> str:
    """The dotted parts that all names begin with, as far as something is left of each."""
    parts = [name.split(".")[:-2] for name in names]
    common = list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    return "".join(f"{column[0]}." for column in common)
