"""What every backend is told about a pass, and what the layers hand it."""

from typing import Any, Protocol

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import Ancestors, Array, Float, Parents, Rows, Tokens, require_array
from mamba_spec_jax.cache.pools import HybridCache, PoolSpec, gather_lengths, require_cache
from mamba_spec_jax.cache.records import CommitBackend, VerifyRecord
from mamba_spec_jax.modes import ForwardMode
from pallas_kernels.tree import ancestor_mask, earlier_parents


@flax.struct.dataclass
class ForwardBatch:
    """The rows of one pass.

    Attributes:
        slots: `[B]` cache slot of each row, -1 for padding.
        lengths: `[B]` tokens committed before the pass.
        num_tokens: `[B]` real tokens of each row in this pass; later columns change nothing.
        positions: `[B, T]` absolute position of each token.
        mode: what the pass is for (static).
        kv_len: how many cache positions attention looks at, at least (static).
        parents: `[B, T]` of a draft tree, None where columns follow each other.
        ancestors: `[B, T, offset + T]` the nodes each column of a tree sees, itself included; None in a chain.
        offset: nodes of the same tree that earlier passes read; their keys precede this pass's (static).
    """

    slots: Rows
    lengths: Rows
    num_tokens: Rows
    positions: Tokens
    mode: ForwardMode = flax.struct.field(pytree_node=False)
    kv_len: int = flax.struct.field(pytree_node=False)
    parents: Parents | None = None
    ancestors: Ancestors | None = None
    offset: int = flax.struct.field(pytree_node=False, default=0)

    @classmethod
    def create(
        cls,
        mode: ForwardMode,
        cache: HybridCache,
        slots: Rows,
        num_tokens: Rows,
        width: int,
        kv_len: int | None = None,
        parents: Parents | None = None,
    ) -> "ForwardBatch":
        """Rows of `width` columns over `cache`; `kv_len` None looks at the whole buffer.

        Tokens for which a row's slot has no room left are not real: the pass leaves them out.

        Raises:
            ValueError: while tracing, for a cache that still awaits the commit of an earlier pass, or arguments that
                do not fit.
        """
        caller = f"ForwardBatch.create in mode {mode.name}"
        require_cache(caller, cache)
        cache.require_committed(caller)
        require_array(f"{caller} got slots", slots, ("B",))
        require_array(f"{caller} got num_tokens", num_tokens, slots.shape)
        kv_len = cache.max_len if kv_len is None else kv_len
        if not 0 < kv_len <= cache.max_len:
            raise ValueError(f"kv_len is {kv_len}, expected 1..{cache.max_len} (the cache's max_len)")
        lengths = gather_lengths(cache, slots)
        num_tokens = jnp.minimum(jnp.clip(num_tokens, 0, width), cache.room(slots)).astype(jnp.int32)
        if parents is None:
            positions = lengths[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
            return cls(slots, lengths, num_tokens, positions, mode, kv_len)
        ancestors = ancestor_mask(parents)
        positions = lengths[:, None] + jnp.sum(ancestors, axis=-1, dtype=jnp.int32) - 1
        return cls(slots, lengths, num_tokens, positions, mode, kv_len, earlier_parents(parents), ancestors)

    @property
    def cache_rows(self) -> Tokens:
        """`[B, T]` the row of the buffer for each column's key: after the committed ones, a tree's in node order."""
        if self.ancestors is None:
            return self.positions
        return self.lengths[:, None] + self.offset + jnp.arange(self.positions.shape[1], dtype=jnp.int32)[None]

    @property
    def is_real(self) -> Array:
        """`[B, T]` whether a column holds a real token."""
        return jnp.arange(self.positions.shape[1], dtype=jnp.int32)[None] < self.num_tokens[:, None]


@flax.struct.dataclass
class AttentionInputs:
    """What a full-attention layer hands to its backend.

    Attributes:
        query: `[B, T, Hq, Dh]`.
        key: `[B, T, Hkv, Dh]`.
        value: `[B, T, Hkv, Dh]`.
    """

    query: Float[Array, "B T Hq Dh"]
    key: Float[Array, "B T Hkv Dh"]
    value: Float[Array, "B T Hkv Dh"]


class AttentionBackend(CommitBackend, Protocol):
    """Runs the token mixer of one layer, and commits what a verify pass has recorded."""

    @property
    def pool_spec(self) -> PoolSpec: ...

    def init_record(self, batch: ForwardBatch) -> VerifyRecord | None:
        """Room for what the pass must remember; None where nothing is left to a commit."""
        ...

    def forward(
        self, layer_id: int, inputs: Any, cache: HybridCache, record: VerifyRecord | None, batch: ForwardBatch
    ) -> tuple[Array, HybridCache, VerifyRecord | None]: ...
