"""A short convolution alone as a recurrent backend (LFM2; Liquid AI 2025): windows of inputs, and no state besides."""

import dataclasses
from typing import Any, ClassVar

import flax.struct

from mamba_spec_jax.array_types import Array, Float, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import LeafSpec
from mamba_spec_jax.modes import ReplayRing
from pallas_kernels.ring import Ring


@flax.struct.dataclass
class ShortConvWeights:
    """The convolution's weights.

    Attributes:
        conv_weight: `[W, C]`, the token's own tap last.
        conv_bias: `[C]` or None.
    """

    conv_weight: Float[Array, "W C"]
    conv_bias: Float[Array, "C"] | None


@flax.struct.dataclass
class ShortConvInputs:
    """What a layer hands to its backend.

    Attributes:
        conv_inputs: `[B, T, C]`.
        weights: the layer's.
    """

    conv_inputs: Float[Array, "B T C"]
    weights: ShortConvWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConv(Recurrence):
    """A convolution over a pool whose states are empty: H is 1, P the channels, N is 0; both strategies are one."""

    heads: int = 1
    state: int = 0

    inputs_type: ClassVar[type] = ShortConvInputs
    conv_activation: ClassVar[str | None] = None

    @property
    def conv_channels(self) -> int:
        return self.head_dim

    @property
    def ring_size(self) -> ReplayRing | None:
        """None: there is nothing to replay."""
        return None

    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        return (), ()

    def _constants(self, inputs: ShortConvInputs) -> dict[str, Array]:
        return {}

    def _tokens(self, mixed: Array, inputs: ShortConvInputs, batch: ForwardBatch) -> Array:
        return mixed[:, :, None]

    def _scan(
        self, index: int, tokens: Array, inputs: ShortConvInputs, batch: ForwardBatch, state: Array
    ) -> tuple[Array, Array]:
        return tokens, state

    def _update(
        self, index: int, tokens: Array, inputs: ShortConvInputs, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        return tokens, state, snapshots, ring

    def _fold(self, h0: Array, kept: dict[str, Array], constants: Any, counts: Rows) -> Array:
        return h0
