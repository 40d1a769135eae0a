"""What a family of checkpoints is: how its configuration reads, and where each of its weights goes."""

import dataclasses
import enum
from collections.abc import Callable, Iterable

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
    """

    name: str
    path: str
    layout: Layout = Layout.SAME
    copy_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of checkpoint, as its `model_type` names it.

    Attributes:
        read_config: the model that a `config.json` describes; ValueError naming the key it cannot honour.
        weights: every weight that a checkpoint of that model has.
        renames: pairs (part of an older name, what it is called in `weights`).
    """

    read_config: Callable[[HFConfig], HybridConfig]
    weights: Callable[[HybridConfig], Iterable[Weight]]
    renames: tuple[tuple[str, str], ...] = ()

    def canonical(self, name: str) -> str:
        """The name that `weights` uses for a stored weight."""
        for old, new in self.renames:
            name = name.replace(old, new)
        return name
