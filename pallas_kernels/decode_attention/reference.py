"""The op in plain JAX, `implementation="xla"`.

Visits the keys block by block; temporaries are one block of keys, of values and of scores. A block after every token's
position would change no bit, so `ends_early` stops at the last one that any row has.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import loops
from pallas_kernels.arithmetic import alike
from pallas_kernels.decode_attention.window import Window
from pallas_kernels.selection import finite, is_finite


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    window: Window,
    kv_len: int,
    block: int,
    *,
    ends_early: bool,
) -> jax.Array:
    """`[B, T, Hq, Dh]` from the scaled query `[B, T, Hq, Dh]` and buffers `[S, M, Hkv, Dh]`."""
    B, T, Hq, Dh = query.shape
    max_len, Hkv = keys.shape[1:3]
    block = min(block, max_len)
    common = jnp.promote_types(query.dtype, keys.dtype)
    grouped = query.reshape(B, T, Hkv, Hq // Hkv, Dh).astype(common)
    ends = window.ends[:, None]
    precision = jax.lax.Precision.HIGHEST

    def visit(step, carry):
        top, total, mixed = carry
        # The last block is shifted back into the buffer; what it repeats of its predecessor is masked out.
        first = step * block
        start = jnp.minimum(first, max_len - block)
        position = start + jnp.arange(block, dtype=jnp.int32)[None]
        written = (position >= first) & (position < ends)  # [B, block]
        k = _read_rows(keys, window.slots, start, block)
        v = jnp.where(written[:, :, None, None], _read_rows(values, window.slots, start, block), 0)
        # Weights of 0 do not take back what is not finite: it is left out, and the tokens that see it are NaN.
        spoilt = jnp.transpose(~jnp.all(is_finite(v), axis=-1), (0, 2, 1))  # [B, Hkv, block]
        visible = written[:, None] & _may_see(position, window, T)  # [B, T, block]
        scores = jnp.einsum(
            "btgrd,bsgd->bgrts", grouped, k.astype(common), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(spoilt[:, :, None, None], jnp.nan, scores)
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe_top = jnp.where(jnp.isfinite(new_top), new_top, 0)
        weights = alike(jnp.exp, scores - safe_top[..., None])
        keep = alike(jnp.exp, top - safe_top)
        update = jnp.einsum(
            "bgrts,bsgd->bgrtd",
            weights.astype(v.dtype),
            finite(v),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return new_top, total * keep + weights.sum(-1), mixed * keep[..., None] + update

    shape = (B, Hkv, Hq // Hkv, T)
    carry = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, Dh), jnp.float32),
    )
    blocks = -(-kv_len // block)
    visited = jnp.minimum(-(-jnp.max(ends) // block), blocks) if ends_early else blocks
    begin = jnp.int32(0)
    if ends_early and window.since is not None:
        first = jnp.min(jnp.where(ends > 0, window.since, jnp.max(ends)))
        begin = jnp.clip(first // block, 0, visited)
    _, total, mixed = loops.fori_loop(begin, jnp.int32(visited), visit, carry)
    mixed = mixed / jnp.where(total > 0, total, 1)[..., None]  # rows that see nothing give zeros
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(B, T, Hq, Dh).astype(query.dtype)


def _may_see(position: jax.Array, window: Window, width: int) -> jax.Array:
    """Which of the positions `[1, block]` each token may look at, `[B, T, block]`."""
    visible = _before(position, window, width)
    return visible if window.since is None else visible & (position[:, None] >= window.since[:, :, None])


def _before(position: jax.Array, window: Window, width: int) -> jax.Array:
    """Which of them are its own, committed, or a predecessor's."""
    node = position - window.lengths[:, None]  # [B, block], negative where committed
    if window.ancestors is None:
        return node[:, None] <= jnp.arange(width, dtype=jnp.int32)[None, :, None]
    last = window.ancestors.shape[-1] - 1
    among_ancestors = jnp.take_along_axis(window.ancestors, jnp.clip(node, 0, last)[:, None], axis=2)
    return (node < 0)[:, None] | among_ancestors


def _read_rows(buffer: jax.Array, slots: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`[B, size, Hkv, Dh]`: one gather of contiguous slices; rows of padding slots are masked by the caller."""

    zero = jnp.int32(0)  # the indices have one dtype, which is not that of Python's 0 in 64-bit mode

    def read(slot):
        return jax.lax.dynamic_slice(buffer, (slot, start, zero, zero), (1, size, *buffer.shape[2:]))[0]

    return jax.vmap(read)(jnp.maximum(slots, 0))
