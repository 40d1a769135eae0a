"""What the recurrent layers of a model are: one description for each kind of recurrence."""

import dataclasses
import math
from typing import Any

from mamba_spec_jax.attention.mamba2 import Mamba2
from mamba_spec_jax.attention.recurrence import Recurrence

MAMBA_NORMS = ("gated", "before_gate", "none")


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 layers (Dao and Gu 2024).

    Attributes:
        heads, head_dim, state, groups: H, P, N, G.
        conv_width: W.
        conv_bias, proj_bias, out_bias: which of convolution, input and output projection have biases.
        chunk_size: tokens a chunk of prefill.
        norm: of the output y and gate z: "gated" norm(y silu(z)), "before_gate" norm(y) silu(z), "none".
        norm_eps: of that norm, None for the model's.
        time_step_limit: clamp of the time step after softplus, the same in every pass.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    chunk_size: int = 256
    norm: str = "gated"
    norm_eps: float | None = None
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self):
        require_positive(self, "heads", "head_dim", "state", "groups", "chunk_size")
        require_multiple(self, "heads", "groups")
        if self.norm not in MAMBA_NORMS:
            raise ValueError(f"Mamba2Config.norm is {self.norm!r}, expected one of {MAMBA_NORMS}")
        if not self.time_step_limit[0] <= self.time_step_limit[1]:
            raise ValueError(f"time_step_limit is {self.time_step_limit}, expected two numbers in ascending order")

    @property
    def inner(self) -> int:
        """Width of what the heads give together."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def backend(self, **options: Any) -> Recurrence:
        """The backend that runs them; options as `Recurrence`'s."""
        return Mamba2(
            heads=self.heads,
            head_dim=self.head_dim,
            state=self.state,
            groups=self.groups,
            conv_width=self.conv_width,
            chunk_size=self.chunk_size,
            dt_limits=self.time_step_limit,
            **options,
        )


RecurrentConfig = Mamba2Config


def require_positive(config: Any, *names: str) -> None:
    """ValueError for a size below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{type(config).__name__}.{name} is {getattr(config, name)}, expected at least 1")


def require_multiple(config: Any, whole: str, part: str) -> None:
    """ValueError unless one size is a multiple of the other."""
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{type(config).__name__}.{whole} is {getattr(config, whole)}, expected a multiple of {part} = "
            f"{getattr(config, part)}"
        )
