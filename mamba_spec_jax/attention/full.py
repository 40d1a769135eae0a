"""Full attention over the key/value buffers: a window's keys are written first and read back under a mask."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Int32, KVBuffer, Rows
from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.cache.pools import KVCache, slot_index


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """Softmax attention with grouped queries, computed block by block over the cache.

    Keys are visited in blocks of `block` positions in a fixed order (online softmax, Milakov and Gimelshein 2018), so
    that temporaries are one block of keys, values and scores, and a token's result has the same bits wherever it stands
    in its window and whatever the static length `kv_len` is: that only says how many blocks are visited, and a block
    beyond a token's position changes nothing.

    Attributes:
        scale: multiplies the scores.
        block: cache positions visited at once.
    """

    scale: float
    block: int = 256

    def forward(
        self, index: int, inputs: AttentionInputs, kv: KVCache, batch: ForwardBatch
    ) -> tuple[Float[Array, "B T Hq Dh"], KVCache]:
        """Appends the window to buffer `index` and attends to everything up to each token's own position.

        In a draft tree, a token attends to what is committed and to its ancestors.
        """
        kv = write_window(index, inputs.key, inputs.value, kv, batch)
        output = self._attend(inputs.query, kv.keys[index], kv.values[index], batch)
        return output.astype(inputs.query.dtype), kv

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
        depth = jnp.arange(path.shape[1], dtype=jnp.int32)
        return jax.tree.map(
            lambda buffer: _move_rows(
                buffer, slots, lengths[:, None] + path, lengths[:, None] + depth, (path >= 0) & (path != depth)
            ),
            kv,
        )

    def _attend(self, query: Array, keys: KVBuffer, values: KVBuffer, batch: ForwardBatch) -> Array:
        B, T, Hq, Dh = query.shape
        max_len, Hkv = keys.shape[1:3]
        block = min(self.block, max_len)
        query = (query * jnp.asarray(self.scale, query.dtype)).reshape(B, T, Hkv, Hq // Hkv, Dh)
        end = (batch.lengths + batch.offset + batch.num_tokens)[:, None]
        precision = jax.lax.Precision.HIGHEST

        def visit(step, carry):
            top, total, mixed = carry
            # The last block is shifted back into the buffer; what it repeats of its predecessor is masked out.
            first = step * block
            start = jnp.minimum(first, max_len - block)
            position = start + jnp.arange(block, dtype=jnp.int32)[None]
            written = (position >= first) & (position < end)  # [B, block]
            k = _read_rows(keys, batch.slots, start, block)
            v = jnp.where(written[:, :, None, None], _read_rows(values, batch.slots, start, block), 0)
            visible = written[:, None] & _may_see(position, batch)  # [B, T, block]
            scores = jnp.einsum("btgrd,bsgd->bgrts", query, k, precision=precision, preferred_element_type=jnp.float32)
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0)
            weights = jnp.exp(scores - safe_top[..., None])
            keep = jnp.exp(top - safe_top)
            update = jnp.einsum(
                "bgrts,bsgd->bgrtd",
                weights.astype(v.dtype),
                v,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return new_top, total * keep + weights.sum(-1), mixed * keep[..., None] + update

        shape = (B, Hkv, Hq // Hkv, T)
        carry = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, Dh)))
        _, total, mixed = jax.lax.fori_loop(0, math.ceil(batch.kv_len / block), visit, carry)
        mixed = mixed / jnp.where(total > 0, total, 1)[..., None]  # rows that see nothing give zeros
        return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(B, T, Hq, Dh)


def _may_see(position: Array, batch: ForwardBatch) -> Array:
    """Which of the cache positions `[1, block]` each token may look at, `[B, T, block]` or broadcast to it."""
    if batch.ancestors is None:
        return position[:, None] <= batch.positions[:, :, None]
    node = position - batch.lengths[:, None]  # [B, block], negative where committed
    last = batch.ancestors.shape[-1] - 1
    among_ancestors = jnp.take_along_axis(batch.ancestors, jnp.clip(node, 0, last)[:, None], axis=2)
    return (node < 0)[:, None] | among_ancestors


def write_window(
    index: int, key: Float[Array, "B T Hkv Dh"], value: Float[Array, "B T Hkv Dh"], kv: KVCache, batch: ForwardBatch
) -> KVCache:
    """Keys and values of a window, written behind what buffer `index` holds of each row."""
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
    # Read into a buffer of their own: the scatter would otherwise read what it has already written over.
    return buffer.at[slot, jnp.where(moves, target, max_len)].set(jax.lax.optimization_barrier(rows), mode="drop")


def _read_rows(buffer: KVBuffer, slots: Array, start: Array, size: int) -> Array:
    """`[B, size, Hkv, Dh]`: one gather of contiguous slices; rows of padding slots are masked by the caller."""

    def read(slot):
        return jax.lax.dynamic_slice(buffer, (slot, start, 0, 0), (1, size, *buffer.shape[2:]))[0]

    return jax.vmap(read)(jnp.maximum(slots, 0))
