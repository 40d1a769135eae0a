"""Which slot belongs to whom: host-side allocation, clearing on admission, and prefix-cache tracking."""

import dataclasses

import jax.numpy as jnp

from mamba_spec_jax.array_types import Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache, slot_index
from pallas_kernels.ring import reset


class SlotAllocator:
    """A free list of cache slots, kept on the host.

    Clear a slot with `reset_slots` when it is handed to a new owner: the allocator never touches the buffers.
    """

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"SlotAllocator got num_slots={num_slots}, expected at least 1")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` slots; raises ValueError, taking none, if fewer are free."""
        if not 0 <= count <= len(self._free):
            raise ValueError(
                f"asked for {count} slots, {len(self._free)} of {self.num_slots} are free: free some first"
            )
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, slots: list[int]) -> None:
        """Gives slots back; raises ValueError, giving none back, if one is not in use or named twice."""
        unknown = [slot for slot in slots if slot not in self._used]
        if unknown or len(set(slots)) != len(slots):
            raise ValueError(f"cannot free slots {slots}: each must be in use and named once, not in use: {unknown}")
        self._used.difference_update(slots)
        self._free.extend(reversed(slots))


def reset_slots(cache: HybridCache, slots: Rows) -> HybridCache:
    """Clears the recurrent state and length of `slots`, whatever they held; indices out of range are ignored.

    Stale keys and values need no clearing: attention never reads past a slot's length. The cache may be donated.
    """
    cache.require_committed("reset_slots")
    index = slot_index(slots, cache.slots)
    ring = cache.mamba.ring
    mamba = dataclasses.replace(
        cache.mamba,
        ssm=cache.mamba.ssm.at[:, index].set(0, mode="drop"),
        conv=cache.mamba.conv.at[:, index].set(0, mode="drop"),
        ring=None if ring is None else reset(ring, slots),
    )
    return dataclasses.replace(cache, mamba=mamba, lengths=cache.lengths.at[index].set(0, mode="drop"))


def tracking_steps(lengths: Rows, accept_lens: Rows, interval: int, path: Tokens | None = None) -> Rows:
    """The node at which each row crosses a tracking boundary, -1 where it crosses none.

    Prefix caches keep a state every `interval` tokens. A row that goes from `lengths` to `lengths + accept_lens`
    committed tokens passes the last boundary `b` at node `b - lengths - 1` of its path.

    Args:
        lengths: `[B]` committed tokens before the verify pass.
        accept_lens: `[B]` tokens accepted, the bonus token included.
        interval: tokens between two boundaries.
        path: `[B, T]` nodes of the accepted path of a tree (`AcceptResult.path`); None for a chain.
    """
    if interval < 1:
        raise ValueError(f"tracking_steps got interval={interval}, expected at least 1")
    after = lengths + accept_lens
    boundary = after // interval * interval
    column = boundary - lengths - 1
    node = column if path is None else jnp.take_along_axis(path, jnp.maximum(column, 0)[:, None], axis=1)[:, 0]
    return jnp.where(lengths // interval != after // interval, node, -1)
