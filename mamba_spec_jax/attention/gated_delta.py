"""The gated delta rule (GDN and KDA) as a recurrent backend: what it reads of a layer, and how its state advances."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Float, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import LeafSpec
from mamba_spec_jax.modes import SpeculativeMode
from pallas_kernels import gated_delta_chunk, gated_delta_update
from pallas_kernels.gated_delta_update.recurrence import GatedDelta as Rule
from pallas_kernels.gated_delta_update.recurrence import Tokens, gates
from pallas_kernels.recurrent import steps
from pallas_kernels.ring import Ring


@flax.struct.dataclass
class GatedDeltaWeights:
    """What the recurrence needs of a layer's weights.

    Attributes:
        conv_weight: `[W, C]`, the token's own tap last.
        dt_bias: `[H]`, or `[H, N]` with a decay per key channel.
        A_log: `[H]`.
        conv_bias: `[C]` or None.
    """

    conv_weight: Float[Array, "W C"]
    dt_bias: Array
    A_log: Float[Array, "H"]
    conv_bias: Float[Array, "C"] | None = None


@flax.struct.dataclass
class GatedDeltaInputs:
    """What a layer hands to its backend.

    Attributes:
        qkv: `[B, T, C]` convolution inputs: queries, keys and values side by side, head by head.
        a: `[B, T, H]` what the decay is made of, or `[B, T, H, N]` with one per key channel.
        b: `[B, T, H]` what beta is made of.
        weights: the layer's.
    """

    qkv: Float[Array, "B T C"]
    a: Array
    b: Float[Array, "B T H"]
    weights: GatedDeltaWeights

    @property
    def conv_inputs(self) -> Array:
        return self.qkv


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta(Recurrence):
    """A gated delta rule over a pool: H value heads, P the size of a value, N that of a key.

    Attributes:
        key_heads: how many heads queries and keys have; value head h reads key head h // (H / key_heads).
        channel_decay: whether each key channel has a decay (KDA), or each head (GDN).
        beta_scale: of the sigmoid that beta is; 2 lets a state's eigenvalues be negative (Grazzi et al. 2024).
    """

    key_heads: int
    channel_decay: bool = False
    beta_scale: float = 1.0

    inputs_type: ClassVar[type] = GatedDeltaInputs

    def __post_init__(self):
        super().__post_init__()
        if self.heads % self.key_heads:
            raise ValueError(
                f"GatedDelta has {self.heads} heads, expected a multiple of its {self.key_heads} key heads"
            )

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.state + self.heads * self.head_dim

    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        float32 = np.dtype(np.float32)
        inputs = (
            ("k", (self.key_heads, self.state), dtype),
            ("v", (self.heads, self.head_dim), dtype),
            ("g", (self.heads, self.state) if self.channel_decay else (self.heads,), float32),
            ("beta", (self.heads,), float32),
        )
        return inputs, ()

    def _constants(self, inputs: GatedDeltaInputs) -> dict[str, Array]:
        return {}

    def _tokens(self, mixed: Array, inputs: GatedDeltaInputs, batch: ForwardBatch) -> Tokens:
        B, T, _ = mixed.shape
        keys = self.key_heads * self.state
        q, k, v = jnp.split(mixed, [keys, 2 * keys], axis=-1)
        g, beta = gates(inputs.a, inputs.b, inputs.weights.A_log, inputs.weights.dt_bias)
        return Tokens(
            q=q.reshape(B, T, self.key_heads, self.state),
            k=k.reshape(B, T, self.key_heads, self.state),
            v=v.reshape(B, T, self.heads, self.head_dim),
            g=g,
            beta=beta * self.beta_scale,
        )

    def _scan(
        self, index: int, tokens: Tokens, inputs: GatedDeltaInputs, batch: ForwardBatch, state: Array
    ) -> tuple[Array, Array]:
        return gated_delta_chunk(state, **tokens._asdict(), slots=batch.slots, num_tokens=batch.num_tokens, layer=index)

    def _update(
        self, index: int, tokens: Tokens, inputs: GatedDeltaInputs, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        return gated_delta_update(
            state,
            **tokens._asdict(),
            slots=batch.slots,
            num_tokens=batch.num_tokens,
            layer=index,
            snapshots=snapshots,
            ring=ring,
            fold=fold,
            parents=batch.parents,
            form="step" if self.verify is SpeculativeMode.DECODE else "chunk",
            implementation=self.implementation,
        )

    def _fold(self, h0: Array, kept: dict[str, Array], constants: dict[str, Any], counts: Rows) -> Array:
        return steps.fold(Rule(1.0), h0, Tokens(**kept), counts)
