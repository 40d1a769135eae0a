"""What the recurrent layers of a model are: one description for each kind of recurrence."""

import dataclasses
import math
from typing import Any, ClassVar

from mamba_spec_jax.attention.gated_delta import GatedDelta
from mamba_spec_jax.attention.mamba1 import Mamba1
from mamba_spec_jax.attention.mamba2 import Mamba2
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.attention.short_conv import ShortConv
from mamba_spec_jax.layers.norms import GATES

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

    title: ClassVar[str] = "Mamba-2"

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


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated delta rule layers: GDN (Yang, Kautz and Hatamizadeh 2024), or KDA (Kimi Linear, 2025).

    Attributes:
        heads, key_heads: H value heads, and how many heads queries and keys have.
        head_dim, state: P and N, the sizes of a value and of a key.
        conv_width: W.
        rank: of KDA's projections to the output gate and to its decay per key channel; 0 for GDN, with a decay a head.
        beta_scale: of the sigmoid that beta is.
        gate: activation of the output gate, which follows a norm of every head: "silu" or "sigmoid".
        norm_eps: of that norm, None for the model's.
    """

    heads: int
    key_heads: int
    head_dim: int
    state: int
    conv_width: int
    rank: int = 0
    beta_scale: float = 1.0
    gate: str = "silu"
    norm_eps: float | None = None

    def __post_init__(self):
        require_positive(self, "heads", "key_heads", "head_dim", "state")
        require_multiple(self, "heads", "key_heads")
        if self.gate not in GATES:
            raise ValueError(f"GatedDeltaConfig.gate is {self.gate!r}, expected one of {tuple(GATES)}")

    @property
    def inner(self) -> int:
        """Width of what the heads give together."""
        return self.heads * self.head_dim

    @property
    def title(self) -> str:
        return "KDA" if self.rank else "GDN"

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.state + self.inner

    def backend(self, **options: Any) -> Recurrence:
        """The backend that runs them; options as `Recurrence`'s."""
        return GatedDelta(
            heads=self.heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            state=self.state,
            conv_width=self.conv_width,
            channel_decay=self.rank > 0,
            beta_scale=self.beta_scale,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """Short gated convolutions without a recurrence (LFM2; Liquid AI 2025).

    Attributes:
        channels: C.
        conv_width: W.
        bias: whether convolution and projections have biases.
    """

    title: ClassVar[str] = "short convolution"

    channels: int
    conv_width: int
    bias: bool = False

    def __post_init__(self):
        require_positive(self, "channels")

    @property
    def conv_channels(self) -> int:
        return self.channels

    def backend(self, **options: Any) -> Recurrence:
        """The backend that runs them; options as `Recurrence`'s."""
        return ShortConv(head_dim=self.channels, conv_width=self.conv_width, **options)


@dataclasses.dataclass(frozen=True)
class Mamba1Config:
    """Mamba-1 layers (Gu and Dao 2023) whose dt, B and C are normed (Jamba; Lieber et al. 2024).

    Attributes:
        channels, state: C, N.
        conv_width: W.
        rank: of the projection to dt.
        conv_bias, proj_bias: whether the convolution, and the projections in and out, have biases.
    """

    title: ClassVar[str] = "Mamba-1"

    channels: int
    state: int
    conv_width: int
    rank: int
    conv_bias: bool = True
    proj_bias: bool = False

    def __post_init__(self):
        require_positive(self, "channels", "state", "rank")

    @property
    def conv_channels(self) -> int:
        return self.channels

    def backend(self, **options: Any) -> Recurrence:
        """The backend that runs them; options as `Recurrence`'s."""
        return Mamba1(head_dim=self.channels, state=self.state, conv_width=self.conv_width, **options)


RecurrentConfig = Mamba2Config | GatedDeltaConfig | Mamba1Config | ShortConvConfig


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
