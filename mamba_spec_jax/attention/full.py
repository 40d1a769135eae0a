"""Full attention over the key/value buffers: a window's keys are written first and read back under a mask."""

import dataclasses

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Int32, KVBuffer, Rows, Tokens
from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.cache.pools import KVCache, slot_index
from pallas_kernels import decode_attention
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """Softmax attention with grouped queries, computed block by block over the cache: see `decode_attention`.

    A token's result has the same bits at every index of its window and for every static length `kv_len`.

    Attributes:
        scale: multiplies the scores.
        block: cache positions that plain JAX visits at once.
        implementation: of the attention kernel; None lets the device decide.
        sliding_window: how many positions each token sees, its own included; None for all.
    """

    scale: float
    block: int = 256
    implementation: Implementation | None = None
    sliding_window: int | None = None

    def forward(
        self, index: int, inputs: AttentionInputs, kv: KVCache, batch: ForwardBatch
    ) -> tuple[Float[Array, "B T Hq Dh"], KVCache]:
        """Appends the window to buffer `index` and attends to everything up to each token's own position.

        In a draft tree, a token attends to what is committed and to its ancestors.
        """
        kv = write_window(index, inputs.key, inputs.value, kv, batch)
        output = decode_attention(
            inputs.query,
            kv.keys[index],
            kv.values[index],
            batch.slots,
            batch.lengths,
            batch.num_tokens,
            scale=self.scale,
            ancestors=batch.ancestors,
            since=self._since(batch),
            kv_len=batch.kv_len,
            block=self.block,
            implementation=self.implementation,
        )
        return output, kv

    def _since(self, batch: ForwardBatch) -> Tokens | None:
        """The first position that each token sees."""
        if self.sliding_window is None:
            return None
        nodes = 0 if batch.ancestors is None else batch.ancestors.shape[-1]
        if nodes > self.sliding_window:
            # Keys of a tree are stored node by node, not by position.
            raise ValueError(
                f"a tree or block of {nodes} nodes does not fit into a sliding_window of {self.sliding_window}"
            )
        return batch.positions - (self.sliding_window - 1)

    def commit(self, kv: KVCache, slots: Rows, lengths: Rows, path: Int32[Array, "B T"]) -> KVCache:
        """Moves the keys and values of an accepted path of a draft tree up to where its tokens' positions are.

        Node `path[b, d]`, written at row `lengths[b] + path[b, d]`, goes to row `lengths[b] + d`. Nothing else moves,
        and nothing is copied if the caller's jit donates the buffers.

        Args:
            kv: as the verify pass left it.
            slots: `[B]` cache slot of each row, -1 for padding.
            lengths: `[B]` tokens committed before the pass.
            path: `[B, T]` node ids from the root on, then -1.
        """
        depth = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
        return jax.tree.map(
            lambda buffer: _move_rows(
                buffer, slots, lengths[:, None] + path, lengths[:, None] + depth, (path >= 0) & (path != depth)
            ),
            kv,
        )


def write_window(
    index: int, key: Float[Array, "B T Hkv Dh"], value: Float[Array, "B T Hkv Dh"], kv: KVCache, batch: ForwardBatch
) -> KVCache:
    """Keys and values of a window, written to buffer `index` after each row's committed ones."""
    keys = _write_rows(kv.keys[index], key, batch)
    values = _write_rows(kv.values[index], value, batch)
    return KVCache(
        keys=(*kv.keys[:index], keys, *kv.keys[index + 1 :]),
        values=(*kv.values[:index], values, *kv.values[index + 1 :]),
    )


def _write_rows(buffer: KVBuffer, window: Float[Array, "B T Hkv Dh"], batch: ForwardBatch) -> KVBuffer:
    slots, max_len = buffer.shape[:2]
    position = jnp.where(batch.is_real, batch.cache_rows, max_len)  # past the end: dropped
    return buffer.at[slot_index(batch.slots, slots)[:, None], position].set(window.astype(buffer.dtype), mode="drop")


def _move_rows(buffer: KVBuffer, slots: Rows, source: Array, target: Array, moves: Array) -> KVBuffer:
    """`buffer[slots[b], target[b, d]] = buffer[slots[b], source[b, d]]` where `moves[b, d]`; all are read first."""
    num_slots, max_len = buffer.shape[:2]
    slot = slot_index(slots, num_slots)[:, None]
    rows = buffer.at[slot, jnp.where(moves, source, 0)].get(mode="clip")
    # Fenced, so that the scatter does not read rows that it has already overwritten.
    return buffer.at[slot, jnp.where(moves, target, max_len)].set(jax.lax.optimization_barrier(rows), mode="drop")
