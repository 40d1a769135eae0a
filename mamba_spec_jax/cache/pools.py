"""The buffers that live across steps: recurrent state, keys and values, and how many tokens each slot holds."""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import ConvPool, Int32, KVBuffer, Rows, SSMPool
from mamba_spec_jax.cache.memory import require_fits
from mamba_spec_jax.modes import ReplayRing
from pallas_kernels.ring import Ring

_FLOAT32 = np.dtype(np.float32)

LeafSpec = tuple[str, tuple[int, ...], np.dtype]  # name, shape and dtype


@dataclasses.dataclass(frozen=True)
class RingSpec:
    """The ring of inputs that REPLAY keeps for each state.

    Attributes:
        size: how many tokens.
        inputs: name, shape and dtype of each input of a token in one layer.
        constants: the same of what of a layer's weights it takes to fold them.
    """

    size: ReplayRing
    inputs: tuple[LeafSpec, ...]
    constants: tuple[LeafSpec, ...] = ()

    def bytes(self, layers: int, slots: int) -> int:
        per_token = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, shape, dtype in self.inputs)
        order = np.dtype(np.int32).itemsize  # one for all layers
        return slots * self.size.length * (layers * per_token + order)

    def zero_inputs(self, layers: int, slots: int) -> dict[str, jax.Array]:
        """`[L, S, Q, *x]` of each input."""
        return {name: jnp.zeros((layers, slots, self.size.length, *shape), dtype) for name, shape, dtype in self.inputs}

    def zero_constants(self, layers: int) -> dict[str, jax.Array]:
        """`[L, *x]` of each constant."""
        return {name: jnp.zeros((layers, *shape), dtype) for name, shape, dtype in self.constants}


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """What one cache slot holds, per layer; static, and shared by every backend that works on the same cache.

    Attributes:
        recurrent_layers: L, recurrent layers in the pool.
        heads, head_dim, state: H, P, N of the SSM state.
        conv_width, conv_channels: W, C of the depthwise convolution.
        attention_layers: layers with keys and values.
        kv_heads, kv_head_dim: Hkv, Dh.
        ssm_dtype, conv_dtype, kv_dtype: storage dtypes.
        ring: the inputs that REPLAY keeps for each state; None under SNAPSHOT.
    """

    recurrent_layers: int
    heads: int
    head_dim: int
    state: int
    conv_width: int
    conv_channels: int
    attention_layers: int = 0
    kv_heads: int = 0
    kv_head_dim: int = 0
    ssm_dtype: np.dtype = _FLOAT32
    conv_dtype: np.dtype = _FLOAT32
    kv_dtype: np.dtype = _FLOAT32
    ring: RingSpec | None = None

    def __post_init__(self):
        for name in ("ssm_dtype", "conv_dtype", "kv_dtype"):
            dtype = jnp.dtype(getattr(self, name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"PoolSpec.{name} is {dtype}, expected a floating dtype such as float32 or bfloat16")
            object.__setattr__(self, name, dtype)
        if self.conv_width < 2:
            raise ValueError(f"PoolSpec.conv_width is {self.conv_width}, expected at least 2: width 1 keeps no window")

    def ssm_shape(self, slots: int) -> tuple[int, ...]:
        return (self.recurrent_layers, slots, self.heads, self.head_dim, self.state)

    def conv_shape(self, slots: int) -> tuple[int, ...]:
        return (self.recurrent_layers, slots, self.conv_width - 1, self.conv_channels)

    def kv_shape(self, slots: int, max_len: int) -> tuple[int, ...]:
        return (slots, max_len, self.kv_heads, self.kv_head_dim)

    def ssm_bytes(self, slots: int = 1) -> int:
        return math.prod(self.ssm_shape(slots)) * self.ssm_dtype.itemsize

    def conv_bytes(self, slots: int = 1) -> int:
        return math.prod(self.conv_shape(slots)) * self.conv_dtype.itemsize

    def ring_bytes(self, slots: int = 1) -> int:
        return 0 if self.ring is None else self.ring.bytes(self.recurrent_layers, slots)

    def kv_bytes(self, slots: int, max_len: int) -> int:
        return 2 * self.attention_layers * math.prod(self.kv_shape(slots, max_len)) * self.kv_dtype.itemsize


@flax.struct.dataclass
class MambaPool:
    """The recurrent state of every layer and slot, one buffer each.

    Attributes:
        ssm: `[L, S, H, P, N]` states.
        conv: `[L, S, W-1, C]` last inputs of the depthwise convolution, oldest first.
        ring: under REPLAY, the inputs since the states in `ssm`: what a slot holds is its state with them folded in.
        constants: of every layer's weights, what it takes to fold them: as of the last commit.
    """

    ssm: SSMPool
    conv: ConvPool
    ring: Ring | None = None
    constants: dict[str, jax.Array] | None = None


@flax.struct.dataclass
class KVCache:
    """Keys and values, one buffer per attention layer.

    Attributes:
        keys: tuple of `[S, M, Hkv, Dh]`.
        values: tuple of `[S, M, Hkv, Dh]`.
    """

    keys: tuple[KVBuffer, ...]
    values: tuple[KVBuffer, ...]


@flax.struct.dataclass
class HybridCache:
    """Everything a hybrid model remembers between passes.

    Attributes:
        mamba: recurrent state.
        kv: keys and values; rows past a slot's length may hold anything.
        lengths: `[S]` committed tokens of each slot.
        max_len: M, tokens a slot has room for (static).
        awaiting_commit: static; set by a backend's `forward` in a verify pass and cleared by the commit, so that a
            step that forgets the commit, or commits twice, is refused while it is traced.
    """

    mamba: MambaPool
    kv: KVCache
    lengths: Int32[jax.Array, "S"]
    max_len: int = flax.struct.field(pytree_node=False)
    awaiting_commit: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def create(cls, spec: PoolSpec, slots: int, max_len: int) -> "HybridCache":
        """An empty cache of `slots` slots with room for `max_len` tokens each; MemoryError if it cannot fit."""
        if slots < 1 or max_len < 1:
            raise ValueError(f"HybridCache.create got slots={slots}, max_len={max_len}, expected both at least 1")
        parts = {
            "ssm": spec.ssm_bytes(slots),
            "conv": spec.conv_bytes(slots),
            "replay ring": spec.ring_bytes(slots),
            "keys and values": spec.kv_bytes(slots, max_len),
        }
        remedy = "fewer slots, a shorter max_len or smaller dtypes"
        require_fits(f"a cache of {slots} slots of {max_len} tokens", parts, remedy)
        kv_shape = spec.kv_shape(slots, max_len)
        keys, values = (
            tuple(jnp.zeros(kv_shape, spec.kv_dtype) for _ in range(spec.attention_layers)) for _ in range(2)
        )
        mamba = MambaPool(
            ssm=jnp.zeros(spec.ssm_shape(slots), spec.ssm_dtype),
            conv=jnp.zeros(spec.conv_shape(slots), spec.conv_dtype),
            **({} if spec.ring is None else _empty_ring(spec.ring, spec.recurrent_layers, slots)),
        )
        return cls(mamba, KVCache(keys, values), jnp.zeros((slots,), jnp.int32), max_len)

    @property
    def slots(self) -> int:
        return self.lengths.shape[0]

    def room(self, slots: Rows) -> Rows:
        """`[B]` tokens that can still be committed to each row's slot, 0 for padding rows."""
        index = slot_index(slots, self.slots)
        return jnp.maximum(self.max_len - self.lengths.at[index].get(mode="fill", fill_value=self.max_len), 0)

    def require_committed(self, caller: str) -> None:
        """Raises ValueError (while tracing) if a verify pass has not been committed."""
        if self.awaiting_commit:
            raise ValueError(
                f"{caller} got a cache that still awaits the commit of a verify pass: call "
                "update_mamba_state_after_mtp_verify with that pass's record first"
            )


def require_cache(caller: str, cache: Any) -> None:
    """Raises ValueError (while tracing) for what is no cache."""
    if not isinstance(cache, HybridCache):
        raise ValueError(
            f"{caller} got a cache of type {type(cache).__name__}, expected a HybridCache: what init_cache made, or "
            "the last pass or commit returned"
        )


def gather_lengths(cache: HybridCache, slots: Rows) -> Rows:
    """Committed tokens of each row, 0 for padding rows (slot out of range)."""
    return cache.lengths.at[slot_index(slots, cache.slots)].get(mode="fill", fill_value=0)


def advance_lengths(cache: HybridCache, slots: Rows, counts: Rows) -> Int32[jax.Array, "S"]:
    """`cache.lengths` with `counts[b]` more tokens in each row's slot; padding rows change nothing."""
    return cache.lengths.at[slot_index(slots, cache.slots)].add(counts, mode="drop")


def slot_index(slots: Rows, num_slots: int) -> Rows:
    """Slots with everything out of range moved past the end, where JAX drops writes (-1 would wrap around)."""
    return jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)


def _empty_ring(spec: RingSpec, layers: int, slots: int) -> dict[str, Any]:
    return {"ring": Ring.empty(spec.zero_inputs(layers, slots)), "constants": spec.zero_constants(layers)}
