"""How the frequencies of a rotary embedding are changed for texts longer than those of the first training.

The kinds are those of transformers 5.24 (`modeling_rope_utils.py`), and compute the same. Two of them, `DynamicScaling`
and `LongRopeScaling`, take frequencies that depend on how long the whole text is. Keys in the cache were rotated when
they were read and cannot follow a text that grows, so here the length is chosen when the model is made: `for_length`.
All positions then have the frequencies that transformers' forward over a whole text of that length has, and a cache in
which a text could outgrow them is refused.
"""

import abc
import dataclasses
import math
from typing import ClassVar, Self

import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float

Frequencies = Float[Array, "half"]


def plain_frequencies(theta: float, dim: int) -> Frequencies:
    """`theta^(-2i/dim)` of the pairs i of `dim` dims, float32."""
    half = dim // 2
    return 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)


@dataclasses.dataclass(frozen=True)
class RotaryScaling(abc.ABC):
    """One kind of scaling; frozen and hashable, without arrays.

    Attributes:
        rope_type: what configuration files call the kind.
        by_length: whether the frequencies depend on the length of the whole text.
    """

    rope_type: ClassVar[str]
    by_length: ClassVar[bool] = False

    @abc.abstractmethod
    def frequencies(self, theta: float, dim: int) -> Frequencies:
        """Radians a position of every pair of `dim` rotated dims, float32; `theta` is the unscaled base."""

    @property
    def magnitude(self) -> float:
        """Multiplies rotated queries and rotated keys."""
        return 1.0

    @property
    def max_length(self) -> int | None:
        """Tokens of the longest text that these frequencies are for, None where any length has the same."""
        return None

    def for_length(self, length: int) -> Self:
        """The same scaling for texts of up to `length` tokens; ValueError where no length changes it."""
        raise ValueError(f"a text of {length} tokens is rotated as any other by {self}: leave rotary_length out")

    def check(self, theta: float, dim: int) -> None:
        """Raises ValueError where `dim` rotated dims with the base `theta` cannot be scaled so; by default all can."""
        return

    def require_room(self, max_len: int) -> None:
        """Raises ValueError if texts in a cache of `max_len` positions could outgrow the frequencies."""
        if self.max_length is not None and max_len > self.max_length:
            raise ValueError(
                f"a cache of {max_len} positions was asked for, but this model's rotary embedding has other "
                f"frequencies in texts of more than {self.max_length} tokens, which keys read before cannot follow: "
                f"use shorter texts, or load(..., rotary_length={max_len}), which rotates all positions as in a text "
                "of that length"
            )


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Positions divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        return plain_frequencies(theta, dim) / self.factor


@dataclasses.dataclass(frozen=True)
class ProportionalScaling(RotaryScaling):
    """Only the first `rotated` pairs turn, with the frequencies that they have among all; divided by `factor`."""

    rope_type: ClassVar[str] = "proportional"
    rotated: int
    factor: float = 1.0

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        turns = jnp.arange(dim // 2, dtype=jnp.int32) < self.rotated
        return jnp.where(turns, plain_frequencies(theta, dim), 0.0) / self.factor


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RotaryScaling):
    """A base that grows with the text (NTK-aware, bloc97 and emozilla 2023).

    Attributes:
        factor: by how much.
        max_position_embeddings: the longest text with unscaled frequencies.
        length: of the texts that the frequencies are for.
    """

    rope_type: ClassVar[str] = "dynamic"
    by_length: ClassVar[bool] = True
    factor: float
    max_position_embeddings: int
    length: int = 0

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        growth = self.factor * self.max_length / self.max_position_embeddings - (self.factor - 1)
        return plain_frequencies(theta * growth ** (dim / (dim - 2)), dim)

    @property
    def max_length(self) -> int:
        return max(self.length, self.max_position_embeddings)

    def for_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def check(self, theta: float, dim: int) -> None:
        if dim <= 2:
            raise ValueError(f"{dim} dims are rotated, expected more than 2 for the rope type dynamic")


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """Low frequencies divided, high ones kept, and a ramp between them (YaRN; Peng et al. 2023).

    Attributes:
        factor: by which low frequencies are divided.
        original_max_position_embeddings: tokens of the longest text of the first training.
        attention_factor: the magnitude.
        beta_fast, beta_slow: turns within that text from which on, and up to which, a pair counts as fast or slow.
        truncate: whether the ramp begins and ends at whole pairs.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        low, high = (self._pair(turns, theta, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        ramp = jnp.clip((jnp.arange(dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        plain = plain_frequencies(theta, dim)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _pair(self, turns: float, theta: float, dim: int) -> float:
        """The pair, in general between two, that turns so often within the original text."""
        return dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def check(self, theta: float, dim: int) -> None:
        if theta <= 1:
            raise ValueError(f"rope_theta is {theta}, expected more than 1 for the rope type yarn")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Frequencies divided where a turn takes long, kept where it is short, and blended between (Llama 3.1).

    Attributes:
        factor: by which low frequencies are divided.
        low_freq_factor, high_freq_factor: turns within the original text up to which, and from which on, a frequency
            counts as low or high.
        original_max_position_embeddings: tokens of the longest text of the first training.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        plain = plain_frequencies(theta, dim)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - kept) * plain / self.factor + kept * plain
        scaled = jnp.where(turns < self.low_freq_factor, plain / self.factor, plain)
        between = (turns >= self.low_freq_factor) & (turns <= self.high_freq_factor)
        return jnp.where(between, blended, scaled)


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """A factor for every pair, one set for texts up to the original length and one for longer (Ding et al. 2024).

    Attributes:
        short_factor, long_factor: by which the frequencies are divided.
        original_max_position_embeddings: tokens of the longest text that takes the short ones.
        attention_factor: the magnitude, whatever the length.
        length: of the texts that the frequencies are for.
    """

    rope_type: ClassVar[str] = "longrope"
    by_length: ClassVar[bool] = True
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    length: int = 0

    def frequencies(self, theta: float, dim: int) -> Frequencies:
        is_short = self.length <= self.original_max_position_embeddings
        factors = self.short_factor if is_short else self.long_factor
        return plain_frequencies(theta, dim) / jnp.asarray(factors, jnp.float32)

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    @property
    def max_length(self) -> int | None:
        original = self.original_max_position_embeddings
        return original if self.length <= original else None

    def for_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def check(self, theta: float, dim: int) -> None:
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != dim // 2:
                raise ValueError(f"{name} has {len(getattr(self, name))} numbers, expected {dim // 2}: one a pair")
