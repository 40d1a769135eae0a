"""What draft heads are trained on: the target's own distributions, from the hidden states they will see when drafting.

Letters: B rows, T tokens of a row, D hidden, V vocabulary, J steps of a draft, A blocks of a row, K tokens of a block.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array
from mamba_spec_jax.attention.base import AttentionInputs

STEP_WEIGHT = 0.8  # each further step counts so much less: it is only reached if the ones before it were right
MASKED = -1e30


def cross_entropy(logits: Array, wanted: Array) -> Array:
    """`[...]` against a distribution, of which tokens that the head cannot propose are left out."""
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.where(jnp.isfinite(log_probs), wanted * log_probs, 0), axis=-1)


def autoregressive_loss(
    module: Any, num_layers: int, hidden: list[Array], embedded: Array, wanted: Array, output: Array, steps: int
) -> Array:
    """Loss of a head that drafts token by token, unrolled over `steps` as it is when it drafts.

    Step j at column c stands for the draft of token c + 2 that began j columns earlier: it reads the embedding of token
    c + 1 and what the step before it said one column earlier. A step in a new layer sees that layer's true past; a
    further step in the last layer sees the true past up to where its draft began, and the draft's own steps
    ("training-time test", Li et al. 2025).

    Args:
        module: the flax module.
        num_layers: its layers.
        hidden: the target's hidden states that it reads, `[B, T, D]` each.
        embedded: `[B, T, D]` scaled embeddings of tokens 1..T.
        wanted: `[B, T, V]` the target's distribution of tokens 2..T+1.
        output: `[D, V]` the target's output projection.
        steps: J.
    """
    source = module.features(tuple(hidden))
    B, T, _ = source.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    attend: _DraftAttention | None = None
    losses, weights = [], []
    for j in range(steps):
        layer = min(j, num_layers - 1)
        if attend is None or j < num_layers:
            attend = _DraftAttention()
        said = module.layer(layer)(embedded, source, positions, attend)
        loss = cross_entropy(module.logits(said, output), wanted)
        losses.append(jnp.mean(loss[:, j:]))
        weights.append(STEP_WEIGHT**j)
        source = jnp.pad(said[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return jnp.dot(jnp.stack(losses), jnp.asarray(weights)) / sum(weights)


def block_loss(
    module: Any,
    hidden: list[Array],
    block: Array,
    mask: Array,
    known: Array,
    starts: Array,
    wanted: Array,
    output: Array,
) -> Array:
    """Loss of a head that fills the masked rest of a block at once.

    Args:
        module: the flax module.
        hidden: the target's hidden states that it reads, `[B, T, D]` each.
        block: `[B, A, K + 1, D]` scaled embeddings of the text from each block's root on.
        mask: `[D]` scaled embedding of the mask.
        known: `[B, A]` how many tokens behind the root are not masked, fewer than K.
        starts: `[B, A]` position of each root; the head sees the hidden states before it.
        wanted: `[B, A, K, V]` the target's distributions of the tokens behind each root.
        output: `[D, V]` the target's output projection.
    """
    features = module.features(tuple(hidden))
    B, T, D = features.shape
    A, K = wanted.shape[1:3]
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    ahead = jnp.arange(K, dtype=jnp.int32) - known[..., None]  # of the first masked token
    block = jnp.concatenate([block[:, :, :1], jnp.where(ahead[..., None] < 0, block[:, :, 1:], mask)], axis=2)
    at = starts[..., None] + jnp.arange(K + 1, dtype=jnp.int32)
    x = block.reshape(B * A, K + 1, D)
    for layer in module.layers:
        context = layer.self_attn.key_value(features, positions)
        x = layer(x, at.reshape(B * A, K + 1), _BlockAttention(context, starts))
    losses = cross_entropy(module.logits(x[:, 1:], output), wanted.reshape(B * A, K, -1)).reshape(B, A, K)
    weights = jnp.where(ahead >= 0, STEP_WEIGHT**ahead, 0)
    return jnp.sum(losses * weights) / jnp.sum(weights)


class _DraftAttention:
    """Attention of the steps of a draft in one layer: the first sees its past, the others what `steps` says."""

    def __init__(self):
        self._keys: list[Array] = []
        self._values: list[Array] = []

    def __call__(self, inputs: AttentionInputs) -> Array:
        query, key, value = _grouped(inputs)
        self._keys.append(key)
        self._values.append(value)
        drafted, T = len(self._keys) - 1, query.shape[1]
        past = jnp.arange(T)[:, None] - jnp.arange(T) >= drafted
        scores = [jnp.where(past, jnp.einsum("btgrd,bsgd->bgrts", query, self._keys[0]), MASKED)]
        # The step after `i` more of them stands `drafted - i` columns to the left.
        shifted = [(_later(k, drafted - i), _later(v, drafted - i)) for i, (k, v) in self._drafted()]
        scores += [jnp.einsum("btgrd,btgd->bgrt", query, k)[..., None] for k, _ in shifted]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        mixed = jnp.einsum("bgrts,bsgd->btgrd", weights[..., :T], self._values[0])
        for i, (_, v) in enumerate(shifted):
            mixed += jnp.einsum("bgrt,btgd->btgrd", weights[..., T + i], v)
        return mixed.reshape(inputs.query.shape)

    def _drafted(self):
        return enumerate(zip(self._keys[1:], self._values[1:], strict=True), 1)


class _BlockAttention:
    """Attention of blocks to themselves and to what stands in front of them."""

    def __init__(self, context: tuple[Array, Array], starts: Array):
        self._key, self._value = context
        self._starts = starts

    def __call__(self, inputs: AttentionInputs) -> Array:
        B, A = self._starts.shape
        query, key, value = (x.reshape(B, A, *x.shape[1:]) for x in _grouped(inputs))
        T = self._key.shape[1]
        before = jnp.arange(T) < self._starts[:, :, None]  # [B, A, T]
        scores = jnp.einsum("batgrd,bsgd->bagrts", query, self._key)
        scores = jnp.where(before[:, :, None, None, None], scores, MASKED)
        own = jnp.einsum("batgrd,basgd->bagrts", query, key)
        weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
        mixed = jnp.einsum("bagrts,bsgd->batgrd", weights[..., :T], self._value)
        mixed += jnp.einsum("bagrts,basgd->batgrd", weights[..., T:], value)
        return mixed.reshape(inputs.query.shape)


def _grouped(inputs: AttentionInputs) -> tuple[Array, Array, Array]:
    """Scaled queries `[B, T, Hkv, Hq/Hkv, Dh]`, keys and values."""
    B, T, _, size = inputs.query.shape
    query = inputs.query.reshape(B, T, inputs.key.shape[2], -1, size) / math.sqrt(size)
    return query, inputs.key, inputs.value


def _later(x: Array, columns: int) -> Array:
    """Moved to the right, zeros coming in."""
    return jnp.pad(x[:, : x.shape[1] - columns], ((0, 0), (columns, 0), (0, 0), (0, 0)))
