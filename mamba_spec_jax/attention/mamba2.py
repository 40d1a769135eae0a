"""The Mamba-2 backend: convolution and recurrence of one layer over the pools, and the commit of a verify pass."""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Int32, Rows
from mamba_spec_jax.attention import ssd, ssd_tree
from mamba_spec_jax.attention.arithmetic import fenced
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.conv import advance_window, causal_conv1d
from mamba_spec_jax.cache.pools import MambaPool, PoolSpec, slot_index
from mamba_spec_jax.cache.records import RecordSpec, VerifyRecord
from mamba_spec_jax.cache.tree import path_to
from mamba_spec_jax.modes import CommitStrategy, SpeculativeMode
from pallas_kernels import state_commit, state_scatter
from pallas_kernels.dispatch import Implementation


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


@flax.struct.dataclass
class ReplayInputs:
    """What REPLAY keeps of a verify pass instead of states.

    Attributes:
        x: `[L, B, T, H, P]`; dt: `[L, B, T, H]`; B: `[L, B, T, G, N]`; A: `[L, H]`.
    """

    x: Float[Array, "L B T H P"]
    dt: Float[Array, "L B T H"]
    B: Float[Array, "L B T G N"]
    A: Float[Array, "L H"]


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """A Mamba-2 recurrence over a pool.

    Attributes:
        heads, head_dim, state, groups: H, P, N, G.
        conv_width: W.
        chunk_size: tokens a chunk of prefill.
        dt_limits: clamp of the time step after softplus.
        verify: DECODE verifies with the step recurrence, PREFILL in the chunked form.
        strategy: what a verify pass keeps for the commit.
        implementation: of the commit kernel; None lets the device decide.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int
    chunk_size: int = 256
    dt_limits: tuple[float, float] = (0.0, math.inf)
    verify: SpeculativeMode = SpeculativeMode.DECODE
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT
    implementation: Implementation | None = None

    def __post_init__(self):
        if self.heads % self.groups:
            raise ValueError(f"Mamba2 has {self.heads} heads, expected a multiple of its {self.groups} groups")

    @property
    def conv_channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state

    def init_record(self, batch: ForwardBatch, spec: PoolSpec, owner: RecordSpec, dtype) -> VerifyRecord:
        """Room for every layer's share of a verify pass; the layers fill it in one by one.

        Args:
            batch: the pass.
            spec: the pool's.
            owner: who will have made the record.
            dtype: of the activations, in which REPLAY keeps x and B.
        """
        L, (B, T) = spec.recurrent_layers, batch.positions.shape
        if self.strategy is CommitStrategy.SNAPSHOT:
            recurrent: object = jnp.zeros((L, B, T, self.heads, self.head_dim, self.state), spec.ssm_dtype)
        else:
            recurrent = ReplayInputs(
                x=jnp.zeros((L, B, T, self.heads, self.head_dim), dtype),
                dt=jnp.zeros((L, B, T, self.heads), jnp.float32),
                B=jnp.zeros((L, B, T, self.groups, self.state), dtype),
                A=jnp.zeros((L, self.heads), jnp.float32),
            )
        conv_inputs = jnp.zeros((L, B, T, self.conv_channels), spec.conv_dtype)
        return VerifyRecord(batch.slots, batch.num_tokens, recurrent, conv_inputs, owner, batch.parents)

    def forward(
        self, index: int, inputs: Mamba2Inputs, pool: MambaPool, record: VerifyRecord | None, batch: ForwardBatch
    ) -> tuple[Float[Array, "B T H P"], MambaPool, VerifyRecord | None]:
        """Layer `index` of the pool. With a record the pool stays untouched; without one it advances."""
        slots = slot_index(batch.slots, pool.ssm.shape[1])
        window = pool.conv.at[index, slots].get(mode="fill", fill_value=0)
        h0 = pool.ssm.at[index, slots].get(mode="fill", fill_value=0)
        # Rounded as the pool will hold them, so that a token sees the same neighbours inside a window and across two.
        conv_inputs = inputs.xBC.astype(pool.conv.dtype)
        ssm_inputs = self._ssm_inputs(window, conv_inputs, inputs, batch)
        A = fenced(-jnp.exp(inputs.weights.A_log.astype(jnp.float32)))
        D = inputs.weights.D.astype(jnp.float32)

        if record is None:
            y, h = ssd.chunk_scan(h0, ssm_inputs, A, D, self.chunk_size)
            pool = MambaPool(
                ssm=pool.ssm.at[index, slots].set(h.astype(pool.ssm.dtype), mode="drop"),
                conv=pool.conv.at[index, slots].set(advance_window(window, conv_inputs, batch.num_tokens), mode="drop"),
            )
        else:
            snapshots: Any = record.recurrent if self.strategy is CommitStrategy.SNAPSHOT else None
            y, snapshots = self._verify(h0, ssm_inputs, A, D, snapshots, index, batch)
            record = self._remember(record, index, conv_inputs, ssm_inputs, A, snapshots)
        return y.astype(inputs.xBC.dtype), pool, record

    def commit(
        self, pool: MambaPool, record: VerifyRecord, steps: Rows, track_slots: Rows | None, track_steps: Rows | None
    ) -> MambaPool:
        """Brings the live slots to node `steps[b]` and the tracked slots to node `track_steps[b]`; negative: none."""
        if self.strategy is CommitStrategy.SNAPSHOT:
            ssm, conv = state_commit(
                pool.ssm,
                pool.conv,
                record.recurrent,
                record.conv_inputs,
                record.slots,
                steps,
                parents=record.parents,
                track_slots=track_slots,
                track_steps=track_steps,
                implementation=self.implementation,
            )
            return MambaPool(ssm, conv)
        # Both sets start from the live slot's old state, hence one scatter after both folds.
        nodes = [steps] if track_steps is None else [steps, track_steps]
        folded = [self._replay(pool, record, node) for node in nodes]
        source = jax.tree.map(lambda *states: jnp.stack(states, axis=2), *folded)
        has_slot = slot_index(record.slots, pool.ssm.shape[1]) < pool.ssm.shape[1]
        entries = [jnp.where(has_slot & (node >= 0), i, -1) for i, node in enumerate(nodes)]
        return state_scatter(
            pool,
            source,
            record.slots,
            entries[0],
            track_slots=track_slots,
            track_steps=None if track_steps is None else entries[1],
            implementation=self.implementation,
        )

    def _verify(
        self, h0: Array, inputs: ssd.SSMInputs, A: Array, D: Array, snapshots: Any, index: int, batch: ForwardBatch
    ) -> tuple[Array, Any]:
        steps = self.verify is SpeculativeMode.DECODE
        if batch.parents is None or batch.ancestors is None:
            return (ssd.step_scan if steps else ssd.window_scan)(h0, inputs, A, D, snapshots, index)
        if steps:
            return ssd_tree.step_tree(h0, inputs, A, D, batch.parents, snapshots, index)
        return ssd_tree.window_tree(h0, inputs, A, D, batch.parents, batch.ancestors, snapshots, index)

    def _ssm_inputs(
        self, window: Array, conv_inputs: Array, inputs: Mamba2Inputs, batch: ForwardBatch
    ) -> ssd.SSMInputs:
        weights = inputs.weights
        B, T, _ = conv_inputs.shape
        mixed = fenced(causal_conv1d(window, conv_inputs, weights.conv_weight, weights.conv_bias, batch.parents))
        mixed = mixed.astype(inputs.xBC.dtype)
        if batch.parents is not None:  # a padding node has a weight of zero among other branches, if it is finite
            mixed = jnp.where(batch.is_real[..., None], mixed, 0)
        inner = self.heads * self.head_dim
        x, b, c = jnp.split(mixed, [inner, inner + self.groups * self.state], axis=-1)
        dt = jax.nn.softplus(inputs.dt.astype(jnp.float32) + weights.dt_bias.astype(jnp.float32))
        dt = fenced(jnp.where(batch.is_real[..., None], jnp.clip(dt, *self.dt_limits), 0))
        return ssd.SSMInputs(
            x=x.reshape(B, T, self.heads, self.head_dim),
            dt=dt,
            B=b.reshape(B, T, self.groups, self.state),
            C=c.reshape(B, T, self.groups, self.state),
        )

    def _remember(
        self,
        record: VerifyRecord,
        index: int,
        conv_inputs: Array,
        inputs: ssd.SSMInputs,
        A: Array,
        snapshots: Array | None,
    ) -> VerifyRecord:
        recurrent: object = snapshots
        if self.strategy is CommitStrategy.REPLAY:
            kept = ReplayInputs(x=inputs.x, dt=inputs.dt, B=inputs.B, A=A)
            recurrent = jax.tree.map(lambda buffer, leaf: buffer.at[index].set(leaf), record.recurrent, kept)
        conv_inputs = record.conv_inputs.at[index].set(conv_inputs)
        return dataclasses.replace(record, recurrent=recurrent, conv_inputs=conv_inputs)

    def _replay(self, pool: MambaPool, record: VerifyRecord, steps: Rows) -> MambaPool:
        """States and windows `[L, B, ...]` after node `steps[b]`, from what the live slots hold now."""
        kept: ReplayInputs = record.recurrent  # type: ignore[assignment]
        slots = slot_index(record.slots, pool.ssm.shape[1])
        path, counts = None, steps + 1
        if record.parents is not None:
            path = path_to(record.parents, steps, record.parents.shape[1])
            counts = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)

        def layer(h0, window, x, dt, b, A, conv_inputs):
            if path is not None:  # a path's inputs, put one behind the other, are a chain's
                x, dt, b, conv_inputs = (_along(path, leaf) for leaf in (x, dt, b, conv_inputs))
            h = ssd.fold(h0, ssd.SSMInputs(x=x, dt=dt, B=b, C=b), A, counts)
            return h, advance_window(window, conv_inputs, counts)

        h0 = pool.ssm.at[:, slots].get(mode="fill", fill_value=0)
        windows = pool.conv.at[:, slots].get(mode="fill", fill_value=0)
        return MambaPool(*jax.vmap(layer)(h0, windows, kept.x, kept.dt, kept.B, kept.A, record.conv_inputs))


def _along(path: Int32[Array, "B T"], leaf: Array) -> Array:
    """`leaf [B, T, ...]` at the nodes of a path; columns behind the path hold anything."""
    return leaf[jnp.arange(path.shape[0])[:, None], jnp.maximum(path, 0)]
