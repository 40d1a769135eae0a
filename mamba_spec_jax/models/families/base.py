"""What a family of checkpoints is: how its configuration reads, and where each of its weights goes."""

import dataclasses
import enum
import math
from collections.abc import Callable, Container, Iterable

import numpy as np

from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.hf_config import HFConfig


class Layout(enum.Enum):
    """How a stored weight relates to the parameter it becomes."""

    SAME = "same"
    SWAPPED = "swapped"  # the last two axes change places: linear layers, alone or stacked by expert
    DEPTHWISE = "depthwise"  # (C, 1, W) becomes [W, C]

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a parameter of `shape` has in the checkpoint."""
        if self is Layout.SWAPPED:
            return (*shape[:-2], shape[-1], shape[-2])
        if self is Layout.DEPTHWISE:
            return (shape[1], 1, shape[0])
        return shape

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        """The parameter, as a view of the stored weight."""
        if self is Layout.SWAPPED:
            return stored.swapaxes(-1, -2)
        if self is Layout.DEPTHWISE:
            return stored[:, 0].T
        return stored


@dataclasses.dataclass(frozen=True)
class Weight:
    """One weight of a checkpoint.

    Attributes:
        name: what the checkpoint calls it.
        path: the parameter it becomes, dotted.
        layout: how it is stored.
        copy_of: name of the weight that it merely repeats; such a weight may be absent, and must be equal if present.
        parts: names of equal parts that it may be stored as instead: rows of a matrix, experts of a stack.
    """

    name: str
    path: str
    layout: Layout = Layout.SAME
    copy_of: str | None = None
    parts: tuple[str, ...] = ()

    def sources(self, found: Container[str]) -> tuple[str, ...]:
        """Names of what is to be read."""
        return self.parts if self.parts and self.name not in found else (self.name,)

    def source_shape(self, shape: tuple[int, ...], found: Container[str]) -> tuple[int, ...]:
        """The shape that each source of a parameter of `shape` has."""
        stored, sources = self.layout.stored_shape(shape), self.sources(found)
        if sources == (self.name,):
            return stored
        rest = stored[-1:] if len(stored) > 1 else ()
        return (math.prod(stored) // math.prod(rest) // len(sources), *rest)

    def to_parameter(self, sources: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """The parameter of `shape`; a view where it is stored whole."""
        whole = sources[0] if len(sources) == 1 else np.concatenate(sources)
        return self.layout.to_parameter(whole.reshape(self.layout.stored_shape(shape)))


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint, as its `model_type` names it.

    Attributes:
        read_config: the model that a `config.json` describes; ValueError naming the key it cannot honour.
        weights: every weight that a checkpoint of that model has.
        renames: pairs (part of an older name, what it is called in `weights`).
        unused: how the names of weights begin that a checkpoint may have and the model has no use for.
    """

    read_config: Callable[[HFConfig], HybridConfig]
    weights: Callable[[HybridConfig], Iterable[Weight]]
    renames: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()

    def canonical(self, name: str) -> str:
        """The name that `weights` uses for a stored weight."""
        for old, new in self.renames:
            name = name.replace(old, new)
        return name
