"""What one program of the Triton kernels holds, and how it takes it from token to token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.gated_delta_update.recurrence import EPS, Tokens

_MOST_ROWS = {4: 32, 2: 16}  # by bytes of a number: 32 rows of 16 bits spilled (sm_90, replaying a ring)


class Tile(NamedTuple):
    """Some rows of V and columns of K of one head's state; masks are None where everything exists."""

    block: jax.Array
    head: jax.Array
    key_head: jax.Array
    leads_key_head: jax.Array
    rows: jax.Array
    columns: jax.Array
    has_row: jax.Array | None
    has_column: jax.Array | None
    has_element: jax.Array | None


def block_rows(V: int, dtype: Any) -> int:
    """How many rows of V a program holds of a state of a dtype."""
    return min(_MOST_ROWS[jnp.dtype(dtype).itemsize], pl.next_power_of_2(V))


def slot_of(slots_ref: Any, b: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """A row's slot, 0 where it is out of range, and whether it is not."""
    slot = slots_ref[b]
    valid = inside(slot, num_slots)
    return jnp.where(valid, slot, 0), valid


def tile_of(block: jax.Array, head: jax.Array, state: Any, key_heads: int) -> Tile:
    """The tile at block `block` of V in head `head` of a pool `[L, S, Hv, V, K]`."""
    _, _, _, V, K = state.shape
    return cut(block, head, state, key_heads, block_rows(V, state.dtype), pl.next_power_of_2(K))


def cut(block: jax.Array, head: jax.Array, state: Any, key_heads: int, height: int, width: int, part: int = 0) -> Tile:
    """Block `block` of `height` rows of V and part `part` of `width` columns of K, in head `head` of a pool."""
    _, _, heads, V, K = state.shape
    group = heads // key_heads
    rows = block * height + jnp.arange(height, dtype=jnp.int32)
    columns = part * width + jnp.arange(width, dtype=jnp.int32)
    has_row = None if V % height == 0 else rows < V
    has_column = None if K % width == 0 else columns < K
    masks = [flags for flags in (None if has_row is None else has_row[:, None],
                                 None if has_column is None else has_column[None]) if flags is not None]  # fmt: skip
    has_element = jnp.broadcast_to(masks[0] & masks[-1], (height, width)) if masks else None
    return Tile(block, head, head // group, head % group == 0, rows, columns, has_row, has_column, has_element)


def load_stored(tile: Tile, ref: Any, index: tuple, *, where: jax.Array) -> jax.Array:
    """The tile from a ref of states `[.., Hv, V, K]`, in its dtype; zeros, and nothing read, unless `where`.

    A row without a slot has slot 0 in its index, which another program may be writing.
    """
    return lax.cond(
        where,
        lambda: _load(_state_at(tile, ref, index), tile.has_element),
        lambda: jnp.zeros((tile.rows.size, tile.columns.size), ref.dtype),
    )


def load_state(tile: Tile, ref: Any, index: tuple, *, where: jax.Array) -> jax.Array:
    """`load_stored` in float32."""
    return load_stored(tile, ref, index, where=where).astype(jnp.float32)


def store_state(tile: Tile, ref: Any, index: tuple, state: jax.Array) -> None:
    """The tile to a ref of states `[.., Hv, V, K]`, in its dtype."""
    triton.store(_state_at(tile, ref, index), state.astype(ref.dtype), mask=tile.has_element)


def store_output(tile: Tile, ref: Any, index: tuple, o: jax.Array) -> None:
    """The tile's rows of an output to a ref `[.., Hv, V]`, in its dtype."""
    triton.store(ref.at[(*index, tile.head, tile.rows)], o.astype(ref.dtype), mask=tile.has_row)


def load_token(tile: Tile, refs: Tokens, index: tuple) -> Tokens:
    """What the tile reads of a token, as it is stored: k and q `[C]`, v `[R]`, g a number or `[C]`, beta a number."""
    per_channel = len(refs.g.shape) == len(index) + 2
    return Tokens(
        k=_load(refs.k.at[(*index, tile.key_head, tile.columns)], tile.has_column),
        v=_load(refs.v.at[(*index, tile.head, tile.rows)], tile.has_row),
        g=_load(refs.g.at[(*index, tile.head, tile.columns)], tile.has_column)
        if per_channel
        else refs.g[(*index, tile.head)],
        beta=refs.beta[(*index, tile.head)],
        q=None if refs.q is None else _load(refs.q.at[(*index, tile.key_head, tile.columns)], tile.has_column),
    )


def store_token(tile: Tile, refs: Tokens, index: tuple, token: Tokens) -> None:
    """The tile's share of a token's inputs; what several tiles have read, one of them stores."""
    triton.store(refs.v.at[(*index, tile.head, tile.rows)], token.v, mask=tile.has_row)

    def store_gates():
        if token.g.ndim:
            triton.store(refs.g.at[(*index, tile.head, tile.columns)], token.g, mask=tile.has_column)
        else:
            refs.g[(*index, tile.head)] = token.g
        refs.beta[(*index, tile.head)] = token.beta

    def store_key():
        triton.store(refs.k.at[(*index, tile.key_head, tile.columns)], token.k, mask=tile.has_column)

    pl.when(tile.block == 0)(store_gates)
    pl.when((tile.block == 0) & tile.leads_key_head)(store_key)


def step(state: jax.Array, token: Tokens) -> jax.Array:
    """The tile after a token, in float32: `recurrence.state_step`."""
    k = _unit(token.k)[None, :]
    decay = jnp.exp(token.g)
    decayed = state * (decay[None, :] if decay.ndim else decay)
    update = token.beta * (token.v.astype(jnp.float32) - jnp.sum(decayed * k, axis=1))
    return decayed + update[:, None] * k


def output(state: jax.Array, token: Tokens, scale: float) -> jax.Array:
    """The tile's rows of the output, from the unrounded state."""
    return jnp.sum(state * (_unit(token.q) * scale)[None, :], axis=1)


def _unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x) + EPS)


def _state_at(tile: Tile, ref: Any, index: tuple) -> Any:
    return ref.at[(*index, tile.head, tile.rows[:, None], tile.columns[None, :])]


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return triton.load(ref, mask=mask, other=None if mask is None else 0)
