"""What every recurrent backend does alike: the convolution, the pools, and the commit of a verify pass."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Rows
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.cache.pools import LeafSpec, MambaPool, PoolSpec, RingSpec, slot_index
from mamba_spec_jax.cache.records import RecordSpec, VerifyRecord
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.modes import CommitStrategy, ReplayRing, SpeculativeMode
from pallas_kernels import causal_conv1d_update, loops, state_commit
from pallas_kernels import ring as rings
from pallas_kernels.arithmetic import fenced
from pallas_kernels.dispatch import Implementation
from pallas_kernels.order import available_after
from pallas_kernels.ring import Ring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence(abc.ABC):
    """A depthwise causal convolution followed by a recurrence, over a pool; subclasses say how a state advances.

    Attributes:
        heads, head_dim, state: H, P, N of a state.
        conv_width: W.
        verify: DECODE verifies with the step recurrence, PREFILL in the chunked form.
        strategy: what a verify pass keeps for the commit.
        replay: REPLAY's ring.
        implementation: of the kernels; None lets the device decide.
    """

    heads: int
    head_dim: int
    state: int
    conv_width: int
    verify: SpeculativeMode = SpeculativeMode.DECODE
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT
    replay: ReplayRing = ReplayRing()  # noqa: RUF009, frozen
    implementation: Implementation | None = None

    inputs_type: ClassVar[type]
    conv_activation: ClassVar[str | None] = "silu"

    def __post_init__(self):
        if self.strategy is CommitStrategy.AUTO:
            raise ValueError(
                f"{type(self).__name__} got CommitStrategy.AUTO: let choose_strategy say which one that is"
            )

    @property
    @abc.abstractmethod
    def conv_channels(self) -> int:
        """C."""

    @abc.abstractmethod
    def _kept(self, dtype) -> tuple[tuple[LeafSpec, ...], tuple[LeafSpec, ...]]:
        """What REPLAY keeps of a token, activations being of `dtype`, and of a layer: see `RingSpec`."""

    @abc.abstractmethod
    def _constants(self, inputs: Any) -> dict[str, Array]:
        """What of a layer's weights it takes to fold what REPLAY kept."""

    @abc.abstractmethod
    def _tokens(self, mixed: Array, inputs: Any, batch: ForwardBatch) -> Any:
        """What is read of each token, from the convolution's outputs `[B, T, C]`; padding changes nothing."""

    @abc.abstractmethod
    def _scan(self, index: int, tokens: Any, inputs: Any, batch: ForwardBatch, state: Array) -> tuple[Array, Array]:
        """One layer's outputs of a stretch of text, chunk by chunk, and the pool of states after it."""

    @abc.abstractmethod
    def _update(
        self, index: int, tokens: Any, inputs: Any, batch: ForwardBatch, state: Array,
        *, snapshots: Array | None = None, ring: Ring | None = None, fold: Array | None = None,
    ) -> tuple[Array, Array, Array | None, Ring | None]:  # fmt: skip
        """One layer's verify window: outputs `[B, T, H, P]`, then the pool of states, snapshots and ring after it."""

    @abc.abstractmethod
    def _fold(self, h0: Array, kept: dict[str, Array], constants: Any, counts: Rows) -> Array:
        """One layer's states `[B, H, P, N]` after the first `counts[b]` of the inputs that a ring kept."""

    @property
    def ring_size(self) -> ReplayRing | None:
        """How long a ring this strategy needs, if any."""
        return self.replay if self.strategy is CommitStrategy.REPLAY else None

    def ring_spec(self, dtype) -> RingSpec | None:
        """The ring that a pool needs, activations being of `dtype`."""
        return None if self.ring_size is None else RingSpec(self.ring_size, *self._kept(dtype))

    def init_record(self, batch: ForwardBatch, spec: PoolSpec, owner: RecordSpec) -> VerifyRecord:
        """Room for every layer's share of a verify pass; the layers fill it in one by one.

        Args:
            batch: the pass.
            spec: the pool's.
            owner: who will have made the record.

        Raises:
            ValueError: the window is longer than what the pool's ring was made for.
        """
        L, (B, T) = spec.recurrent_layers, batch.positions.shape
        if spec.ring is None:
            shape = (L, B, T, self.heads, self.head_dim, self.state)
            # Not zeros, which would cost as many bytes as the snapshots: what is committed has been written before.
            recurrent: Any = jax.lax.empty(shape, spec.ssm_dtype)
        else:
            if self.replay.window < T:
                raise ValueError(
                    f"a verify pass of {T} tokens does not fit {self.replay}, which was made for windows of "
                    f"{self.replay.window}: create the model with a larger ReplayRing"
                )
            recurrent = {name: (jnp.zeros(shape, dtype),) * L for name, shape, dtype in spec.ring.constants}
        conv_inputs = jnp.zeros((L, B, T, self.conv_channels), spec.conv_dtype)
        tree = None if batch.parents is None or batch.ancestors is None else Tree(batch.parents, batch.ancestors)
        return VerifyRecord(batch.slots, batch.num_tokens, batch.lengths, recurrent, conv_inputs, owner, tree)

    def forward(
        self, index: int, inputs: Any, pool: MambaPool, record: VerifyRecord | None, batch: ForwardBatch
    ) -> tuple[Array, MambaPool, VerifyRecord | None]:
        """Layer `index` of the pool: outputs `[B, T, H, P]`.

        Without a record the pool advances. With one, what its slots hold stays the same; under REPLAY the window's
        inputs are written after the history, and where the ring gets full the history is folded into the state.
        """
        # Fenced: XLA may skip rounding to 16 bits what it computes on with, and a pool or ring keeps it rounded.
        x, weights = fenced(inputs.conv_inputs), inputs.weights
        mixed, conv, conv_inputs = causal_conv1d_update(
            x,
            pool.conv,
            weights.conv_weight,
            weights.conv_bias,
            layer=index,
            slots=batch.slots,
            num_tokens=batch.num_tokens if record is None else None,
            conv_inputs=None if record is None else record.conv_inputs,
            parents=batch.parents,
            activation=self.conv_activation,
            implementation=self.implementation,
        )
        if batch.parents is not None:  # a padding node has a weight of zero among other branches, if it is finite
            mixed = jnp.where(batch.is_real[..., None], mixed, 0)
        tokens = fenced(self._tokens(mixed, inputs, batch))
        if record is None:
            pool = dataclasses.replace(self._settle(index, pool, inputs, batch.slots), conv=conv)
            y, ssm = self._scan(index, tokens, inputs, batch, pool.ssm)
            pool = dataclasses.replace(pool, ssm=ssm)
        else:
            y, pool, record = self._verify(index, tokens, inputs, pool, record, batch)
            record = dataclasses.replace(record, conv_inputs=conv_inputs)  # type: ignore[arg-type]  # was given
        return y.astype(x.dtype), pool, record

    def commit(
        self, pool: MambaPool, record: VerifyRecord, steps: Rows, track_slots: Rows | None, track_steps: Rows | None,
        *, validate: bool = False,
    ) -> MambaPool:  # fmt: skip
        """Brings the live slots to node `steps[b]` and the tracked slots to node `track_steps[b]`; negative: none.

        `validate` as of `state_commit`.
        """
        if pool.ssm.shape[0] == 0:  # a model of attention alone
            return pool
        ring = pool.ring
        scatters = ring is None and self.state > 0
        ssm, conv = state_commit(
            pool.ssm if scatters else (),
            pool.conv,
            record.recurrent if scatters else (),
            record.conv_inputs,
            record.slots,
            steps,
            parents=None if record.tree is None else record.tree.parents,
            track_slots=track_slots,
            track_steps=track_steps,
            implementation=self.implementation,
            validate=validate,
        )
        if ring is None:
            return dataclasses.replace(pool, ssm=ssm if scatters else pool.ssm, conv=conv)
        constants = {name: jnp.stack(layers) for name, layers in record.recurrent.items()}
        pool = dataclasses.replace(pool, conv=conv, constants=constants)
        folded = self._folds(ring, record.slots, record.conv_inputs.shape[2])
        if track_slots is not None and track_steps is not None:
            pool, ring = self._track(pool, ring, record, folded, track_slots, track_steps)
        if record.tree is not None:  # the order may only change once the pass has written its inputs by it
            written = jax.tree.leaves(ring.inputs)[0][-1, jnp.clip(record.slots, 0, pool.ssm.shape[1] - 1), 0]
            steps = available_after(steps, written)
        path, counts = record.path_to(steps)
        if record.tree is not None:
            ring = rings.accept_path(ring, record.slots, path)
        return dataclasses.replace(pool, ring=rings.extend(ring, record.slots, folded, counts))

    def materialize(self, pool: MambaPool, slots: Rows) -> MambaPool:
        """Folds the history of `slots [B]` into their states, for whoever reads `pool.ssm` himself; -1 is padding."""
        ring = pool.ring
        if ring is None or pool.ssm.shape[0] == 0:
            return pool
        in_order = jnp.broadcast_to(jnp.arange(ring.length, dtype=jnp.int32), (slots.size, ring.length))
        pool = self._write_folded(pool, ring, slots, in_order, rings.rows_of(ring.counts, slots), slots)
        return dataclasses.replace(pool, ring=rings.clear(ring, slots))

    def _verify(
        self, index: int, tokens: Any, inputs: Any, pool: MambaPool, record: VerifyRecord, batch: ForwardBatch
    ) -> tuple[Array, MambaPool, VerifyRecord]:
        if pool.ring is None:
            y, _, snapshots, _ = self._update(index, tokens, inputs, batch, pool.ssm, snapshots=record.recurrent)
            return y, pool, dataclasses.replace(record, recurrent=snapshots)
        fold = self._folds(pool.ring, batch.slots, batch.positions.shape[1])
        y, ssm, _, ring = self._update(index, tokens, inputs, batch, pool.ssm, ring=pool.ring, fold=fold)
        constants = {
            name: (*record.recurrent[name][:index], value, *record.recurrent[name][index + 1 :])
            for name, value in self._constants(inputs).items()
        }
        pool = dataclasses.replace(pool, ssm=ssm, ring=ring)
        return y, pool, dataclasses.replace(record, recurrent=constants)

    def _settle(self, index: int, pool: MambaPool, inputs: Any, slots: Rows) -> MambaPool:
        """Folds the history of `slots` into their states in one layer, and forgets it with the last one."""
        ring = pool.ring
        if ring is None:
            return pool
        at = slot_index(slots, pool.ssm.shape[1])
        kept, counts = rings.read_history(ring, index, slots), rings.rows_of(ring.counts, slots)
        states = pool.ssm.at[index, at].get(mode="fill", fill_value=0)
        states = self._fold(states, kept, self._constants(inputs), counts)
        last = index == pool.ssm.shape[0] - 1
        return dataclasses.replace(
            pool,
            ssm=pool.ssm.at[index, at].set(states, mode="drop"),
            ring=rings.clear(ring, slots) if last else ring,
        )

    def _folds(self, ring: Ring, slots: Rows, num_tokens: int) -> Array:
        """Which rows fold their history in a pass of `num_tokens`."""
        return rings.must_fold(rings.rows_of(ring.counts, slots), num_tokens, self.replay.window, ring.length)

    def _track(
        self, pool: MambaPool, ring: Ring, record: VerifyRecord, folded: Array, track_slots: Rows, track_steps: Rows
    ) -> tuple[MambaPool, Ring]:
        """Writes the states at `track_steps [B]` to `track_slots [B]`, from what the live slots hold."""
        history = rings.rows_of(ring.counts, record.slots)[:, None]
        path, counts = record.path_to(track_steps)
        # The inputs of a pass follow the history in the ring, whether that pass has folded it or not.
        start = jnp.where(folded[:, None], history, 0)
        offsets = start + jnp.arange(ring.length, dtype=jnp.int32)[None]
        node = jnp.take_along_axis(path, jnp.clip(offsets - history, 0, path.shape[1] - 1), axis=1)
        offsets = jnp.where(offsets < history, offsets, history + jnp.maximum(node, 0))
        has_slot = slot_index(record.slots, pool.ssm.shape[1]) < pool.ssm.shape[1]
        target = jnp.where(has_slot & (counts > 0), track_slots, -1)
        num_tokens = (history - start)[:, 0] + counts
        pool = self._write_folded(pool, ring, record.slots, offsets, num_tokens, target)
        return pool, rings.clear(ring, target)

    def _write_folded(
        self, pool: MambaPool, ring: Ring, slots: Rows, offsets: Array, num_tokens: Rows, to_slots: Rows
    ) -> MambaPool:
        """Writes the states after the first `num_tokens[b]` of the inputs at `offsets [B, n]` of each row's ring."""
        source, target = (slot_index(each, pool.ssm.shape[1]) for each in (slots, to_slots))
        entries = rings.entries(ring, slots, offsets)

        def layer(index, ssm):
            kept = rings.read_entries(ring, index, slots, entries)
            constants = jax.tree.map(lambda leaf: leaf[index], pool.constants)
            states = self._fold(ssm.at[index, source].get(mode="fill", fill_value=0), kept, constants, num_tokens)
            return ssm.at[index, target].set(states, mode="drop")

        # A layer's states at a time.
        return dataclasses.replace(
            pool, ssm=loops.fori_loop(jnp.int32(0), jnp.int32(pool.ssm.shape[0]), layer, pool.ssm)
        )
