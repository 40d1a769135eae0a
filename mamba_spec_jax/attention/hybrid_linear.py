"""The backend of a hybrid model: each layer goes to full attention or to the recurrence, and the commit lives here."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Rows, require_array
from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import HybridCache, PoolSpec, advance_lengths, gather_lengths, require_cache
from mamba_spec_jax.cache.records import RecordSpec, VerifyRecord, require_record
from mamba_spec_jax.cache.validation import check_commit
from mamba_spec_jax.modes import ForwardMode
from pallas_kernels.order import available_after

_COMMIT = "update_mamba_state_after_mtp_verify"
_ATTENTION, _RECURRENT = "attention", "recurrence"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class HybridLinearAttnBackend:
    """Full attention for `full_attn_layers`, the recurrence for `linear_attn_layers`.

    A layer may be in both, and its inputs then say which of the two runs; or in neither, and then never comes here.

    Attributes:
        num_layers: all layers.
        full_attn_layers: ids of those with keys and values, ascending.
        full: their attention.
        linear: the recurrence.
        pool_spec: the pools this backend works on.
        linear_attn_layers: ids of those with recurrent state, ascending; None is every layer without keys and values.
    """

    num_layers: int
    full_attn_layers: tuple[int, ...]
    full: FullAttention
    linear: Recurrence
    pool_spec: PoolSpec
    linear_attn_layers: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self):
        if self.linear_attn_layers is None:
            others = tuple(i for i in range(self.num_layers) if i not in self.full_attn_layers)
            object.__setattr__(self, "linear_attn_layers", others)
        spec, linear = self.pool_spec, self.linear
        expected = {
            "attention_layers": len(self.full_attn_layers),
            "recurrent_layers": len(self.linear_attn_layers),
            "heads": linear.heads,
            "head_dim": linear.head_dim,
            "state": linear.state,
            "conv_width": linear.conv_width,
            "conv_channels": linear.conv_channels,
        }
        for name, value in expected.items():
            if getattr(spec, name) != value:
                raise ValueError(
                    f"pool_spec.{name} is {getattr(spec, name)}, expected {value} from this backend's layers"
                )
        if (spec.ring.size if spec.ring else None) != linear.ring_size:
            raise ValueError(
                f"pool_spec.ring is {spec.ring}, expected one of size {linear.ring_size} for {linear.strategy.name}"
            )

    def __str__(self) -> str:
        return f"HybridLinearAttnBackend({self.linear.verify.name} form, {self.linear.strategy.name})"

    def init_record(self, batch: ForwardBatch) -> VerifyRecord | None:
        """Room for what a verify pass leaves to the commit; None for passes that advance the state themselves."""
        if not batch.mode.defers_state:
            return None
        return self.linear.init_record(batch, self.pool_spec, self._owner(batch.mode))

    def forward(
        self,
        layer_id: int,
        inputs: Any,
        cache: HybridCache,
        record: VerifyRecord | None,
        batch: ForwardBatch,
    ) -> tuple[Array, HybridCache, VerifyRecord | None]:
        """Mixes one layer's tokens.

        Args:
            layer_id: which layer of the model.
            inputs: `AttentionInputs` for full attention, the recurrence's own for the others.
            cache: may be donated by the caller's jit.
            record: from `init_record`, threaded through the layers.
            batch: the pass.

        Returns:
            `[B, T, heads, head_dim]`, the cache and the record. After a verify pass the cache awaits its commit.

        Raises:
            ValueError: while tracing. The inputs are of another kind than the layer; the record is missing or of
                another pass; the layer has run in this pass already; the cache awaits the commit of an earlier pass.
        """
        self._check_inputs(layer_id, inputs)
        if batch.mode is ForwardMode.IDLE:
            return self._idle_output(inputs), cache, record
        kind = _ATTENTION if isinstance(inputs, AttentionInputs) else _RECURRENT
        cache, record = _enter(layer_id, kind, cache, record, batch.mode)
        if isinstance(inputs, AttentionInputs):
            output, kv = self.full.forward(self.full_attn_layers.index(layer_id), inputs, cache.kv, batch)
            if record is not None and record.tree is not None and layer_id == self.full_attn_layers[-1]:
                # The commit of a tree moves keys and values, so it has to wait for attention as well.
                record = dataclasses.replace(record, num_tokens=available_after(record.num_tokens, output))
            return output, dataclasses.replace(cache, kv=kv), record
        index = self.linear_attn_layers.index(layer_id)
        output, pool, record = self.linear.forward(index, inputs, cache.mamba, record, batch)
        if record is not None and index == self.pool_spec.recurrent_layers - 1:
            record = dataclasses.replace(record, num_tokens=available_after(record.num_tokens, output))
        return output, dataclasses.replace(cache, mamba=pool), record

    def update_mamba_state_after_mtp_verify(
        self,
        cache: HybridCache,
        record: VerifyRecord,
        last_correct_step_indices: Rows,
        mamba_track_indices: Rows | None = None,
        mamba_steps_to_track: Rows | None = None,
        *,
        validate: bool = False,
    ) -> HybridCache:
        """Brings every row's recurrent state, convolution window and length to its accepted prefix.

        After a tree verify the accepted prefix is the path from the root to the row's node. Its keys and values are
        moved to the rows after the committed ones, and the row grows by the path's length.

        Args:
            cache: as the verify pass returned it; donate it, and nothing is copied.
            record: from that pass. One made by another backend, mode or strategy is refused while tracing, and so is
                a second commit.
            last_correct_step_indices: `[B]` node of the last accepted token, accept_len - 1 on a chain. A row keeps
                its state if its node is negative or past its real tokens (those for which its slot had room), if its
                slot is out of range, or if that slot no longer holds as many tokens as when the record was made.
            mamba_track_indices: `[B]` slot that also receives a state, for a prefix cache; negative for none.
            mamba_steps_to_track: `[B]` node whose state goes there; required with the former.
            validate: eager calls only: raise where a row would keep its state for any other reason than a node or slot
                of -1, and where two rows name one slot.

        Raises:
            ValueError: the record is another backend's, or not of the pass that the cache awaits the commit of; a
                shape does not fit; tracking is half given.
        """
        require_cache(_COMMIT, cache)
        require_record(_COMMIT, record)
        owner = self._owner(record.spec.mode)
        if record.spec != owner:
            raise ValueError(
                f"this record was made by {record.spec}, but the commit belongs to {owner}: commit with the backend "
                f"that ran the verify pass (they differ in {record.spec.differences(owner)})"
            )
        self._require_pass(cache, record)
        if (mamba_track_indices is None) != (mamba_steps_to_track is None):
            raise ValueError(
                "mamba_track_indices and mamba_steps_to_track go together: got "
                f"{'only the steps' if mamba_track_indices is None else 'only the indices'}"
            )
        rows, held = record.slots.shape, gather_lengths(cache, record.slots)
        nodes = {"last_correct_step_indices": last_correct_step_indices}
        track_slots = track_steps = None
        if mamba_track_indices is not None:
            track_slots = _indices("mamba_track_indices", mamba_track_indices, rows)
            nodes["mamba_steps_to_track"] = mamba_steps_to_track  # type: ignore[assignment]  # both came, or neither
        nodes = {name: _indices(name, node, rows) for name, node in nodes.items()}
        if validate:
            check_commit(record, held, nodes)
        steps, *tracked = (_real_nodes(record, held, node) for node in nodes.values())
        if tracked:
            (track_steps,) = tracked
        pool = self.linear.commit(cache.mamba, record, steps, track_slots, track_steps, validate=validate)
        path, counts = record.path_to(steps)
        kv = cache.kv if record.tree is None else self.full.commit(cache.kv, record.slots, held, path)
        lengths = advance_lengths(cache, record.slots, counts)
        return dataclasses.replace(cache, mamba=pool, kv=kv, lengths=lengths, awaiting_commit=False)

    def materialize(self, cache: HybridCache, slots: Rows) -> HybridCache:
        """Folds what REPLAY keeps of `slots [B]` into `cache.mamba.ssm`, for whoever reads or exports it; -1: none.

        What the slots hold stays the same, and under SNAPSHOT there is nothing to do. Donate the cache.
        """
        cache.require_committed("materialize")
        return dataclasses.replace(cache, mamba=self.linear.materialize(cache.mamba, slots))

    def _check_inputs(self, layer_id: int, inputs: object) -> None:
        routes = (
            ("full-attention", AttentionInputs, self.full_attn_layers),
            ("recurrent", self.linear.inputs_type, self.linear_attn_layers),
        )
        kinds = [kind for kind, _, layers in routes if layer_id in layers]
        expected = [inputs_type for _, inputs_type, layers in routes if layer_id in layers]
        if not isinstance(inputs, tuple(expected)):
            known = "; ".join(f"{kind}: {layers}" for kind, _, layers in routes)
            raise ValueError(
                f"layer {layer_id} is a {' and '.join(kinds) or 'feed-forward'} layer: got {type(inputs).__name__}, "
                f"expected {' or '.join(each.__name__ for each in expected) or f'the id of a token mixer ({known})'}"
            )

    def _idle_output(self, inputs: Any) -> Array:
        if isinstance(inputs, AttentionInputs):
            return jnp.zeros_like(inputs.query)
        return jnp.zeros(
            (*inputs.conv_inputs.shape[:2], self.linear.heads, self.linear.head_dim), inputs.conv_inputs.dtype
        )

    def _require_pass(self, cache: HybridCache, record: VerifyRecord) -> None:
        """Refuses a record that lacks layers, and a cache that no verify pass has left to a commit."""
        expected = [(i, _ATTENTION) for i in self.full_attn_layers] + [(i, _RECURRENT) for i in self.linear_attn_layers]
        missing = [f"layer {i}'s {kind}" for i, kind in expected if (i, kind) not in record.layers]
        if missing:
            raise ValueError(
                f"{_COMMIT} got a record without {', '.join(missing)}: call forward in each layer, and pass the record "
                "on that it returns"
            )
        if expected and not cache.awaiting_commit:
            raise ValueError(
                f"{_COMMIT} got a cache that awaits no commit: each verify pass is committed once, on the cache that "
                "it returned"
            )

    def _owner(self, mode: ForwardMode) -> RecordSpec:
        return RecordSpec(backend=self, mode=mode, strategy=self.linear.strategy)


def _enter(
    layer_id: int, kind: str, cache: HybridCache, record: VerifyRecord | None, mode: ForwardMode
) -> tuple[HybridCache, VerifyRecord | None]:
    """Cache and record as a layer may go on from them; refuses those that belong to another pass."""
    caller = f"layer {layer_id} in mode {mode.name}"
    require_cache(caller, cache)
    if not mode.defers_state:
        if record is not None:
            raise ValueError(f"{caller} got a record, expected None: the pass advances the state itself")
        cache.require_committed(caller)
        return cache, None
    record = require_record(caller, record)
    if not record.layers:
        cache.require_committed(caller)
    elif not cache.awaiting_commit:
        raise ValueError(
            f"{caller} got a cache without the layers that the record has: pass on what the layer before returned"
        )
    if (layer_id, kind) in record.layers:
        raise ValueError(f"{caller} has run its {kind} in this pass already: init_record begins another pass")
    record = dataclasses.replace(record, layers=(*record.layers, (layer_id, kind)))
    return dataclasses.replace(cache, awaiting_commit=True), record


def _indices(name: str, value: Rows, rows: tuple[int, ...]) -> Rows:
    require_array(f"{_COMMIT} got {name}", value, rows)
    return value.astype(jnp.int32)


def _real_nodes(record: VerifyRecord, held: Rows, nodes: Rows) -> Rows:
    """The nodes that have a real token, else -1; -1 too in rows whose slot has been committed since."""
    return jnp.where((nodes < record.num_tokens) & (held == record.held), jnp.maximum(nodes, -1), -1)
