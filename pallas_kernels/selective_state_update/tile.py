"""What one program of the Triton kernels works on: some rows of P, with all of N, of one head's state in one slot."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.history import History
from pallas_kernels.selective_state_update.operands import Blocks, Reads


class Tile(NamedTuple):
    """One program's share of a state.

    Attributes:
        layer, row, slot, head, group: where it is; slot is 0 where exists does not hold.
        exists: whether the row has a slot.
        p, n: its rows and columns, which may reach past the state.
        head_dim, state: P and N.
        first: whether it is its head's first tile, which writes what all tiles of a head share.
        leads: whether it also is of its group's first head, and writes what all heads of a group share.
    """

    layer: jax.Array
    row: jax.Array
    slot: jax.Array
    head: jax.Array
    group: jax.Array
    exists: jax.Array
    p: jax.Array
    n: jax.Array
    head_dim: int
    state: int
    first: jax.Array
    leads: jax.Array

    @classmethod
    def of_program(cls, reads: Reads, blocks: Blocks, pool_shape: tuple[int, ...], groups: int) -> "Tile":
        """The tile of the program that runs, of a pool `[L, S, H, P, N]`."""
        _, num_slots, H, P, N = pool_shape
        part, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        slot = reads.slots[row]
        exists = inside(slot, num_slots)
        return cls(
            layer=reads.layer[0],
            row=row,
            slot=jnp.where(exists, slot, 0),
            head=head,
            group=lax.div(head, jnp.int32(H // groups)),
            exists=exists,
            p=part * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32),
            n=jnp.arange(blocks.cols, dtype=jnp.int32),
            head_dim=P,
            state=N,
            first=part == 0,
            leads=(part == 0) & (lax.rem(head, jnp.int32(H // groups)) == 0),
        )

    def columns(self, part: jax.Array) -> "Tile":
        """The tile a number of its widths further along N."""
        return self._replace(n=part * self.n.size + self.n)

    def history(self, reads: Reads) -> History:
        """The row's history; empty where the row has no slot."""
        count = reads.counts[self.slot] if reads.num_tokens is None else reads.num_tokens[self.row]
        size = jnp.where(self.exists, jnp.clip(count, 0, reads.order.shape[1]), 0)
        return History(reads.order, self.slot, reads.starts[self.slot], size)

    def load_state(self, pool_ref: Any) -> jax.Array:
        """The tile's state in float32, zeros where the row has no slot."""
        exists = jnp.full((self.p.size, self.n.size), self.exists)
        at = pool_ref.at[self.layer, self.slot, self.head, self.p[:, None], self.n[None, :]]
        return triton.load(at, mask=_both(exists, self.pn_mask), other=0).astype(jnp.float32)

    def store_state(self, pool_ref: Any, slot: jax.Array, h: jax.Array, where: jax.Array) -> None:
        """Writes the tile's state to a slot of the pool."""

        @pl.when(where)
        def _():
            at = pool_ref.at[self.layer, slot, self.head, self.p[:, None], self.n[None, :]]
            triton.store(at, h.astype(pool_ref.dtype), mask=self.pn_mask)

    def store_snapshot(self, snapshots_ref: Any, t: jax.Array, h: jax.Array) -> None:
        """Writes the state after token t."""
        at = snapshots_ref.at[self.layer, self.row, t, self.head, self.p[:, None], self.n[None, :]]
        triton.store(at, h.astype(snapshots_ref.dtype), mask=self.pn_mask)

    @property
    def p_mask(self) -> jax.Array | None:
        """Which rows exist; None where all do."""
        return None if self.head_dim % self.p.size == 0 else self.p < self.head_dim

    @property
    def n_mask(self) -> jax.Array | None:
        """Which columns exist; None where all do."""
        return None if self.state % self.n.size == 0 else self.n < self.state

    @property
    def pn_mask(self) -> jax.Array | None:
        """Which elements exist; None where all do."""
        p, n = self.p_mask, self.n_mask
        return _both(None if p is None else p[:, None], None if n is None else n[None, :])


def load(at: Any, mask: jax.Array | None) -> jax.Array:
    """A ref's values in float32, 0 where the mask does not hold."""
    return triton.load(at, mask=mask, other=None if mask is None else 0).astype(jnp.float32)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
