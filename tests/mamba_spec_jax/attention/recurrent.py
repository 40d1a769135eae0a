"""A recurrent backend fed with projected inputs, and what decoding token by token makes of them.

The pools start as NaNs with a payload of their own, so that a test sees every byte that moves.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.gated_delta import GatedDelta, GatedDeltaWeights
from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.attention.mamba1 import Mamba1, Mamba1Inputs, Mamba1Weights
from mamba_spec_jax.attention.mamba2 import Mamba2, Mamba2Weights
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.attention.short_conv import ShortConv, ShortConvWeights
from mamba_spec_jax.cache.pools import HybridCache, MambaPool, PoolSpec, advance_lengths
from mamba_spec_jax.cache.slots import reset_slots
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, ReplayRing, SpeculativeMode
from pallas_kernels.compat import CPU_MOVES_BFLOAT16
from pallas_kernels.ring import clear

SLOTS = 11
# Quiet NaNs with a payload: any arithmetic on them, or any copy between slots, would show.
POISON = {"float32": 0x7FC01234, "bfloat16": 0x7FD3, "float16": 0x7E37}
BITS = {4: np.uint32, 2: np.uint16}


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16 and not CPU_MOVES_BFLOAT16:  # old compilers change a NaN's payload in passing
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.view(BITS[array.dtype.itemsize])


def assert_same_bits(actual, expected, message="") -> None:
    """Equality of every byte: tells -0 from 0 and one NaN from another."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=message)


# Every kind of recurrence, at odd sizes.
KINDS: dict[str, tuple[type[Recurrence], dict[str, Any]]] = {
    "mamba2": (Mamba2, {"heads": 3, "head_dim": 5, "state": 9, "groups": 1, "conv_width": 4, "chunk_size": 4}),
    "gated_delta": (GatedDelta, {"heads": 6, "head_dim": 5, "state": 7, "key_heads": 2, "conv_width": 4}),
    "mamba1": (Mamba1, {"head_dim": 7, "state": 5, "conv_width": 4}),
    "short_conv": (ShortConv, {"head_dim": 7, "conv_width": 4}),
}


def make_backend(
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
    verify: SpeculativeMode = SpeculativeMode.DECODE,
    *,
    kind: str = "mamba2",
    layers: int = 1,
    ssm_dtype="float32",
    conv_dtype="float32",
    activations="float32",
    **options,
) -> HybridLinearAttnBackend:
    """A backend of recurrent layers alone; options of its `kind`."""
    recurrence, sizes = KINDS[kind]
    replay = ReplayRing(length=19, window=9)
    linear = recurrence(**(sizes | options), verify=verify, strategy=strategy, replay=replay)
    spec = PoolSpec(
        layers,
        linear.heads,
        linear.head_dim,
        linear.state,
        linear.conv_width,
        linear.conv_channels,
        ssm_dtype=ssm_dtype,
        conv_dtype=conv_dtype,
        ring=linear.ring_spec(np.dtype(activations)),
    )
    return HybridLinearAttnBackend(layers, (), FullAttention(1.0), linear, spec)


def make_weights(backend: HybridLinearAttnBackend, seed: int = 0, dtype="float32", bias: bool = True):
    """The weights of each layer."""
    rng, linear = np.random.default_rng(seed), backend.linear

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    def layer():
        H, C, W = linear.heads, linear.conv_channels, linear.conv_width
        conv = {"conv_weight": draw(W, C), "conv_bias": draw(C) if bias else None}
        if isinstance(linear, GatedDelta):
            dt_bias = draw(H, linear.state) if linear.channel_decay else draw(H)
            return GatedDeltaWeights(**conv, dt_bias=dt_bias, A_log=draw(H))
        if isinstance(linear, Mamba1):
            return Mamba1Weights(**conv, A_log=draw(C, linear.state), D=draw(C))
        if isinstance(linear, ShortConv):
            return ShortConvWeights(**conv)
        return Mamba2Weights(**conv, dt_bias=draw(H), A_log=draw(H), D=draw(H))

    return tuple(layer() for _ in range(backend.num_layers))


def make_inputs(backend: HybridLinearAttnBackend, rows: int, tokens: int, seed: int = 1, dtype="float32"):
    """Projected inputs `[L, B, T, ...]`, the convolution's first."""
    rng, linear = np.random.default_rng(seed), backend.linear
    shapes: tuple[tuple[int, ...], ...] = (linear.conv_channels,), (linear.heads,)
    if isinstance(linear, GatedDelta):
        a = (linear.heads, linear.state) if linear.channel_decay else (linear.heads,)
        shapes = (linear.conv_channels,), a, (linear.heads,)
    elif isinstance(linear, Mamba1):
        shapes = (linear.conv_channels,), (linear.conv_channels,), (linear.state,), (linear.state,)
    elif isinstance(linear, ShortConv):
        shapes = ((linear.conv_channels,),)
    drawn = (rng.normal(size=(backend.num_layers, rows, tokens, *shape)) for shape in shapes)
    return tuple(np.array(jnp.asarray(leaf, dtype)) for leaf in drawn)


def poisoned_cache(backend: HybridLinearAttnBackend, slots: int = SLOTS) -> HybridCache:
    cache = HybridCache.create(backend.pool_spec, slots, max_len=64)

    def poison(array):
        if array.dtype == jnp.int32:  # what the last owners of the slots left in the ring: cursors, and an order
            return jnp.full_like(array, 3) if array.ndim == 1 else jnp.roll(array, 5, axis=1)[:, ::-1]
        pattern = POISON[str(array.dtype)]
        return jnp.asarray(np.full(array.shape, pattern, BITS[array.dtype.itemsize]).view(array.dtype))

    lengths = jnp.full_like(cache.lengths, 7)
    return dataclasses.replace(cache, mamba=jax.tree.map(poison, cache.mamba), lengths=lengths)


def projected(leaf):
    """Computed in the program that reads it, as a projection is: XLA may keep more digits of it than its dtype has."""
    return leaf * np.asarray(1.1, leaf.dtype)


def layer_inputs(linear: Recurrence, leaves, weights):
    """What a layer hands to its backend; Mamba-1's parameters are not made of the convolution's outputs here."""
    leaves = [projected(leaf) for leaf in leaves]
    if isinstance(linear, Mamba1):
        x, dt, B, C = leaves
        return Mamba1Inputs(x, weights, lambda mixed: (jnp.abs(dt).astype(jnp.float32), B, C))
    return linear.inputs_type(*leaves, weights)


@functools.partial(jax.jit, static_argnames=("backend", "mode"))
def forward(backend, mode: ForwardMode, cache, weights, slots, num_tokens, *leaves, parents=None):
    """One pass over all layers: outputs `[L, B, T, H, P]`, the cache, and the record of a pass that defers state."""
    batch = ForwardBatch.create(mode, cache, slots, num_tokens, leaves[0].shape[2], parents=parents)
    record = backend.init_record(batch)
    outputs = []
    for layer in range(backend.num_layers):
        inputs = layer_inputs(backend.linear, [leaf[layer] for leaf in leaves], weights[layer])
        y, cache, record = backend.forward(layer, inputs, cache, record, batch)
        outputs.append(y)
    if record is None:
        cache = dataclasses.replace(cache, lengths=advance_lengths(cache, batch.slots, batch.num_tokens))
    return jnp.stack(outputs), cache, record


@functools.partial(jax.jit, static_argnames="backend")
def commit(backend, cache, record, steps, track_slots=None, track_steps=None):
    return backend.update_mamba_state_after_mtp_verify(cache, record, steps, track_slots, track_steps)


reset = jax.jit(reset_slots)


def admitted(backend, weights, slots, prompt, num_tokens) -> HybridCache:
    """A poisoned cache in which `slots` were cleared and given a prompt; the others still hold NaNs."""
    slots = jnp.asarray(slots, jnp.int32)
    cache = reset(poisoned_cache(backend), slots)
    num_tokens = jnp.asarray(num_tokens, jnp.int32)
    return forward(backend, ForwardMode.EXTEND, cache, weights, slots, num_tokens, *prompt)[1]


def occupied(backend, slots, lengths, seed: int = 2) -> HybridCache:
    """A poisoned cache whose `slots` hold random states, as if they had read `lengths` tokens."""
    rng, cache = np.random.default_rng(seed), poisoned_cache(backend)

    def fill(pool):
        pool = np.array(pool)
        pool[:, slots] = rng.normal(size=pool[:, slots].shape)
        return jnp.asarray(pool)

    mamba = dataclasses.replace(cache.mamba, ssm=fill(cache.mamba.ssm), conv=fill(cache.mamba.conv))
    cache = dataclasses.replace(cache, mamba=mamba, lengths=cache.lengths.at[slots].set(lengths))
    return adopted(backend, cache, slots)


def decode_history(backend, weights, cache, slots, inputs):
    """Decodes every token of `inputs` on its own.

    Returns:
        outputs `[L, B, T, H, P]`, and the states and windows after 0..T tokens, `[L, B, T + 1, ...]`.
    """
    slots = jnp.asarray(slots, jnp.int32)
    zeros, ones = jnp.zeros_like(slots), jnp.ones_like(slots)
    outputs, pools = [], [cache.mamba]
    for t in range(inputs[0].shape[2]):
        y, cache, record = forward(
            backend, ForwardMode.DECODE, cache, weights, slots, ones, *(leaf[:, :, t : t + 1] for leaf in inputs)
        )
        cache = commit(backend, cache, record, zeros)
        outputs.append(y[:, :, 0])
        pools.append(cache.mamba)
    states, windows = (
        np.stack([np.asarray(getattr(pool, name))[:, np.asarray(slots)] for pool in pools], axis=2)
        for name in ("ssm", "conv")
    )
    return np.stack(outputs, axis=2), MambaPool(states, windows)


def adopted(backend, cache: HybridCache, slots) -> HybridCache:
    """What a cache of SNAPSHOT holds in `slots`, in a cache of this backend; its ring is full of NaNs."""
    empty = poisoned_cache(backend).mamba
    ring = None if empty.ring is None else clear(empty.ring, jnp.asarray(slots))
    mamba = dataclasses.replace(cache.mamba, ring=ring, constants=empty.constants)
    return dataclasses.replace(cache, mamba=mamba)


@functools.partial(jax.jit, static_argnames="backend")
def held(backend, cache: HybridCache, slots) -> MambaPool:
    """What `slots` hold, all of it in the states; before the commit of a verify pass too."""
    cache = dataclasses.replace(cache, awaiting_commit=False)
    return backend.materialize(cache, jnp.asarray(slots, jnp.int32)).mamba


def expected_pool(pool: MambaPool, history: MambaPool, targets) -> MambaPool:
    """`pool` with `(slot, row, tokens)` of `targets` holding what decoding `tokens` of that row left behind."""
    ssm, conv = np.array(pool.ssm), np.array(pool.conv)
    for slot, row, tokens in targets:
        ssm[:, slot] = history.ssm[:, row, tokens]
        conv[:, slot] = history.conv[:, row, tokens]
    return MambaPool(ssm, conv)


def assert_same_pool(actual: MambaPool, expected: MambaPool, message="") -> None:
    assert_same_bits(actual.ssm, expected.ssm, f"ssm {message}")
    assert_same_bits(actual.conv, expected.conv, f"conv {message}")
