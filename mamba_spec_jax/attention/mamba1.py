"""Mamba-1 as a recurrent backend: what it reads of a layer, and how its state advances."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import LeafSpec
from pallas_kernels import mamba1_state_update
from pallas_kernels.arithmetic import fenced
from pallas_kernels.mamba1_state_update.recurrence import Mamba1 as Rule
from pallas_kernels.mamba1_state_update.recurrence import Mamba1Inputs as Tokens
from pallas_kernels.recurrent import steps
from pallas_kernels.ring import Ring


@flax.struct.dataclass
class Mamba1Weights:
    """What the recurrence needs of a layer's weights.

    Attributes:
        conv_weight: `[W, C]`, the token's own tap last.
        conv_bias: `[C]` or None.
        A_log: `[C, N]`; A = -exp(A_log).
        D: `[C]`.
    """

    conv_weight: Float[Array, "W C"]
    conv_bias: Float[Array, "C"] | None
    A_log: Float[Array, "C N"]
    D: Float[Array, "C"]


@flax.struct.dataclass
class Mamba1Inputs:
    """What a layer hands to its backend.

    Attributes:
        conv_inputs: `[B, T, C]`.
        weights: the layer's.
        parameters: dt `[B, T, C]` in float32 and after softplus, B and C `[B, T, N]`, which the layer makes of the
            convolution's outputs (static).
    """

    conv_inputs: Float[Array, "B T C"]
    weights: Mamba1Weights
    parameters: Callable[[Array], tuple[Array, Array, Array]] = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba1(Recurrence):
    """A Mamba-1 recurrence over a pool: H is 1, P the channels; both ways to verify are the step recurrence."""

    heads: int = 1

    inputs_type: ClassVar[type] = Mamba1Inputs

    @property
    def conv_channels(self) -> int:
        return self.head_dim

    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        float32 = np.dtype(np.float32)
        inputs = (("x", (self.head_dim,), dtype), ("dt", (self.head_dim,), float32), ("B", (self.state,), dtype))
        return inputs, (("A", (self.head_dim, self.state), float32),)

    def _constants(self, inputs: Mamba1Inputs) -> dict[str, Array]:
        return {"A": fenced(-jnp.exp(inputs.weights.A_log.astype(jnp.float32)))}

    def _tokens(self, mixed: Array, inputs: Mamba1Inputs, batch: ForwardBatch) -> Tokens:
        dt, B, C = inputs.parameters(mixed)
        return Tokens(x=mixed, dt=jnp.where(batch.is_real[..., None], dt, 0), B=B, C=C)

    def _scan(
        self, index: int, tokens: Tokens, inputs: Mamba1Inputs, batch: ForwardBatch, state: Array
    ) -> tuple[Array, Array]:
        y, state, _, _ = self._update(index, tokens, inputs, batch, state)
        return y, state

    def _update(
        self, index: int, tokens: Tokens, inputs: Mamba1Inputs, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        y, state, snapshots, ring = mamba1_state_update(
            state, tokens.x, tokens.dt, self._constants(inputs)["A"], tokens.B, tokens.C,
            inputs.weights.D.astype(jnp.float32),
            layer=index,
            slots=batch.slots,
            snapshots=snapshots,
            ring=ring,
            fold=fold,
            parents=batch.parents,
        )  # fmt: skip
        return y[:, :, None], state, snapshots, ring

    def _fold(self, h0: Array, kept: dict[str, Array], constants: dict[str, Any], counts: Rows) -> Array:
        return steps.fold(Rule(constants["A"]), h0, Tokens(**kept), counts)
