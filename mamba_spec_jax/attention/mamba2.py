"""Mamba-2 as a recurrent backend: what it reads of a layer, and how its state advances."""

import dataclasses
import math
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import LeafSpec
from mamba_spec_jax.modes import SpeculativeMode
from pallas_kernels import selective_state_update, ssd_chunk_scan
from pallas_kernels.arithmetic import alike, fenced
from pallas_kernels.recurrent import steps
from pallas_kernels.ring import Ring
from pallas_kernels.selective_state_update.recurrence import Mamba2 as Rule
from pallas_kernels.selective_state_update.recurrence import SSMInputs


@flax.struct.dataclass
class Mamba2Weights:
    """What the recurrence needs of a layer's weights.

    Attributes:
        conv_weight: `[W, C]`, the token's own tap last.
        conv_bias: `[C]` or None.
        dt_bias: `[H]`.
        A_log: `[H]`; A = -exp(A_log).
        D: `[H]`.
    """

    conv_weight: Float[Array, "W C"]
    conv_bias: Float[Array, "C"] | None
    dt_bias: Float[Array, "H"]
    A_log: Float[Array, "H"]
    D: Float[Array, "H"]


@flax.struct.dataclass
class Mamba2Inputs:
    """What a Mamba-2 layer hands to its backend.

    Attributes:
        xBC: `[B, T, C]` convolution inputs: x, B and C side by side.
        dt: `[B, T, H]` before bias and softplus.
        weights: the layer's.
    """

    xBC: Float[Array, "B T C"]
    dt: Float[Array, "B T H"]
    weights: Mamba2Weights

    @property
    def conv_inputs(self) -> Array:
        return self.xBC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrence):
    """A Mamba-2 recurrence over a pool.

    Attributes:
        groups: G, of B and C; head h reads group h // (H/G).
        chunk_size: tokens a chunk of prefill.
        dt_limits: clamp of the time step after softplus.
    """

    groups: int
    chunk_size: int = 256
    dt_limits: tuple[float, float] = (0.0, math.inf)

    inputs_type: ClassVar[type] = Mamba2Inputs

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.groups:
            raise ValueError(f"Mamba2 has {self.heads} heads, expected a multiple of its {self.groups} groups")

    @property
    def conv_channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state

    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        float32 = np.dtype(np.float32)
        inputs = (
            ("x", (self.heads, self.head_dim), dtype),
            ("dt", (self.heads,), float32),
            ("B", (self.groups, self.state), dtype),
        )
        return inputs, (("A", (self.heads,), float32),)

    def _constants(self, inputs: Mamba2Inputs) -> dict[str, Array]:
        return {"A": fenced(-jnp.exp(inputs.weights.A_log.astype(jnp.float32)))}

    def _tokens(self, mixed: Array, inputs: Mamba2Inputs, batch: ForwardBatch) -> SSMInputs:
        B, T, _ = mixed.shape
        inner = self.heads * self.head_dim
        x, b, c = jnp.split(mixed, [inner, inner + self.groups * self.state], axis=-1)
        bias = inputs.weights.dt_bias.astype(jnp.float32)[None, None]
        dt = alike(jax.nn.softplus, inputs.dt.astype(jnp.float32) + bias)
        dt = jnp.where(batch.is_real[..., None], jnp.clip(dt, *self.dt_limits), 0)
        return SSMInputs(
            x=x.reshape(B, T, self.heads, self.head_dim),
            dt=dt,
            B=b.reshape(B, T, self.groups, self.state),
            C=c.reshape(B, T, self.groups, self.state),
        )

    def _scan(
        self, index: int, tokens: SSMInputs, inputs: Mamba2Inputs, batch: ForwardBatch, state: Array
    ) -> tuple[Array, Array]:
        return ssd_chunk_scan(
            state,
            tokens.x,
            tokens.dt,
            self._constants(inputs)["A"],
            tokens.B,
            tokens.C,
            inputs.weights.D.astype(jnp.float32),
            layer=index,
            slots=batch.slots,
            chunk_size=self.chunk_size,
        )

    def _update(
        self, index: int, tokens: SSMInputs, inputs: Mamba2Inputs, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        return selective_state_update(
            state, tokens.x, tokens.dt, self._constants(inputs)["A"], tokens.B, tokens.C,
            inputs.weights.D.astype(jnp.float32),
            layer=index,
            slots=batch.slots,
            snapshots=snapshots,
            ring=ring,
            fold=fold,
            parents=batch.parents,
            form="step" if self.verify is SpeculativeMode.DECODE else "chunk",
            implementation=self.implementation,
        )  # fmt: skip

    def _fold(self, h0: Array, kept: dict[str, Array], constants: dict[str, Any], counts: Rows) -> Array:
        return steps.fold(Rule(constants["A"]), h0, SSMInputs(**kept), counts)
