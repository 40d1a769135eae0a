"""The op in plain JAX, `implementation="xla"`; leaves arrive as pool `[L, S, X]` and states `[L, R, T, X]`.

Two forms, because no single one is good on both sides. Measured on a CPU (8 layers, 16 entries of 64 KB, donated): row
copies take 0.41 ms in 0.4 KB of temporaries; gather and scatter 0.63 ms in temporaries as large as what is moved. On a
GPU a loop of row copies is thousands of tiny kernels, while gather and scatter are two.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import compat, loops
from pallas_kernels.arguments import Indices
from pallas_kernels.entries import inside


def scatter(pools: list[jax.Array], states: list[jax.Array], indices: Indices, *, row_copies: bool) -> list[jax.Array]:
    """The pools with both index sets written; row_copies picks the form for CPUs."""
    move = _copy_rows if row_copies else _gather_and_scatter
    rows = source_rows(indices)
    pools = move(pools, states, rows, indices.slots, indices.steps)
    if indices.track_slots is not None:
        pools = move(pools, states, rows, indices.track_slots, indices.track_steps)
    return pools


def source_rows(indices: Indices) -> jax.Array:
    """The row each entry reads, `[B]` int32."""
    return jnp.arange(indices.slots.size, dtype=jnp.int32) if indices.rows is None else indices.rows


def bits(array: jax.Array) -> jax.Array:
    """A floating array's bits as unsigned integers, which no compiler rounds, flushes or quiets on the way."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def movable(array: jax.Array) -> jax.Array:
    """The array in a dtype that XLA's CPU compiler moves as it is; a copy where that is another dtype.

    A row copy of a float8 array would widen the whole array and round it back: hundreds of times slower than moving
    bits, and it rewrites NaNs in slots that nobody names (float8_e5m2, jax 0.10.2 and 0.12).
    """
    return array if compat.cpu_moves(array.dtype) else bits(array)


def restored(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Undoes `bits` and `movable`."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def read(array: jax.Array, start: tuple, shape: tuple[int, ...]) -> jax.Array:
    """A slice at a start of integers and int32 scalars, which 64-bit mode would not mix."""
    return lax.dynamic_slice(array, [jnp.asarray(i, jnp.int32) for i in start], shape)


def write(array: jax.Array, values: jax.Array, start: tuple) -> jax.Array:
    """The array with a slice replaced; see `read`."""
    return lax.dynamic_update_slice(array, values, [jnp.asarray(i, jnp.int32) for i in start])


def for_each(valid: jax.Array, body: Callable, carry):
    """Folds `body(i, carry)` over the positions where `valid [B]` holds, in order."""
    order = jnp.argsort(~valid, stable=True).astype(jnp.int32)
    return loops.fori_loop(jnp.int32(0), valid.sum(dtype=jnp.int32), lambda n, carry: body(order[n], carry), carry)


def scatter_rows(pool: jax.Array, slots: jax.Array, valid: jax.Array, values: jax.Array) -> jax.Array:
    """`pool [L, S, *x]` with `values [L, B, *x]` at `slots [B]` where valid, as one scatter into a flat pool.

    Both indexed dimensions lead in the flat pool: XLA's GPU scatter would transpose the pool otherwise.
    """
    layers, size = pool.shape[:2]
    flat = jnp.arange(layers, dtype=jnp.int32)[:, None] * size + slots
    # Skipped entries point past the end, each elsewhere, so that the promise of unique indices holds.
    past = layers * size + jnp.arange(layers * slots.size, dtype=jnp.int32).reshape(layers, slots.size)
    where = jnp.where(valid, flat, past).reshape(-1)
    rows = pool.reshape(layers * size, *pool.shape[2:])
    rows = rows.at[where].set(values.reshape(-1, *pool.shape[2:]), mode="drop", unique_indices=True)
    return rows.reshape(pool.shape)


def _copy_rows(pools, states, rows, slots, steps):
    dtypes = [pool.dtype for pool in pools]
    states = [movable(state) for state in states]

    def copy(i, pools):
        moved = []
        for pool, state in zip(pools, states, strict=True):
            layers, _, _, size = state.shape
            row = read(state, (0, rows[i], steps[i], 0), (layers, 1, 1, size))
            moved.append(write(pool, row.reshape(layers, 1, size), (0, slots[i], 0)))
        return moved

    pools = for_each(_valid(pools, states, rows, slots, steps), copy, [movable(pool) for pool in pools])
    return [restored(pool, dtype) for pool, dtype in zip(pools, dtypes, strict=True)]


def _gather_and_scatter(pools, states, rows, slots, steps):
    valid = _valid(pools, states, rows, slots, steps)
    moved = []
    for pool, state in zip(pools, states, strict=True):
        picked = state.at[:, rows, steps].get(mode="clip")
        moved.append(scatter_rows(pool, slots, valid, picked))
    return moved


def _valid(pools, states, rows, slots, steps):
    _, num_rows, num_steps, _ = states[0].shape
    return inside(slots, pools[0].shape[1]) & inside(rows, num_rows) & inside(steps, num_steps)
