"""The user function of the op: checks, then one implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.arguments import as_int32, check_shape
from pallas_kernels.decode_attention import reference, triton
from pallas_kernels.decode_attention.window import Window
from pallas_kernels.dispatch import Implementation
from pallas_kernels.entries import inside

_OP = "decode_attention"
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def decode_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    num_tokens: jax.Array | None = None,
    *,
    scale: float,
    ancestors: jax.Array | None = None,
    since: jax.Array | None = None,
    kv_len: int | None = None,
    block: int = 256,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attends from each token of a window to its slot's committed keys and to the window's own, in the buffers.

        output[b, t] = softmax over s of (scale * query[b, t] . keys[slots[b], s]) times values[slots[b], s],
        s < lengths[b] + t + 1 in a chain; s < lengths[b], and the rows of t's ancestors, in a tree; s >= since[b, t]

    In the shapes below B is rows, T tokens of the window, Hq and Hkv query and key heads (query head h reads key head
    `h // (Hq / Hkv)`), Dh their size, S slots, M positions of a slot. The window's keys and values are in the buffers
    already, token j of row b at position `lengths[b] + offset + j`. Keys are visited block by block in an order that
    depends on nothing but their position (online softmax, Milakov and Gimelshein 2018), so that a token's result has
    the same bits at every index of its window and whatever other rows hold. Nothing after the window is read into
    the result, NaN or not, and neither the scores of all keys nor the rows' keys are ever stored.

    Args:
        query: `[B, T, Hq, Dh]`.
        keys: `[S, M, Hkv, Dh]`.
        values: `[S, M, Hkv, Dh]`.
        slots: `[B]` int32; rows whose slot is out of range see nothing and give zeros (-1 is the padding index).
        lengths: `[B]` int32, committed positions of each row.
        num_tokens: `[B]` int32, real tokens of each window, None for T; later columns give anything finite.
        scale: multiplies the query, in its dtype.
        ancestors: `[B, T, offset + T]` bool, which rows of the window each token of a tree sees, itself included; the
            first `offset` of them were written by earlier passes over the same tree. None for a chain, offset 0.
        since: `[B, T]` int32, the first position that each token sees, for a sliding window; None for all.
        kv_len: no row ends after this position (static); M by default.
        block: positions that plain JAX visits at once; the kernels have their own (static).
        implementation: "xla", "triton", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.

    Returns:
        `[B, T, Hq, Dh]` in the query's dtype; sums are float32.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.

    Source: split keys as in Flash-Decoding (Dao and others 2023).
    """
    check_shape(_OP, "query", query, ("B", "T", "Hq", "Dh"))
    batch, width, heads, size = query.shape
    check_shape(_OP, "keys", keys, ("S", "M", "Hkv", size))
    check_shape(_OP, "values", values, keys.shape)
    num_slots, max_len, kv_heads, _ = keys.shape
    if heads % kv_heads:
        raise ValueError(f"{_OP}: query has {heads} heads, expected a multiple of the {kv_heads} of keys")
    for name, array in (("query", query), ("keys", keys), ("values", values)):
        if array.dtype not in _DTYPES:
            raise ValueError(f"{_OP}: {name} is {array.dtype}, expected float32, bfloat16 or float16")
    if keys.dtype != values.dtype:
        raise ValueError(f"{_OP}: values is {values.dtype}, expected {keys.dtype} as keys")
    kv_len = max_len if kv_len is None else kv_len
    if not 0 < kv_len <= max_len:
        raise ValueError(f"{_OP}: kv_len is {kv_len}, expected 1..{max_len} (the buffers' length)")
    if block < 1:
        raise ValueError(f"{_OP}: block is {block}, expected at least 1")
    num_tokens = jnp.full((batch,), width, jnp.int32) if num_tokens is None else num_tokens
    given = {"slots": slots, "lengths": lengths, "num_tokens": num_tokens}
    slots, lengths, num_tokens = (as_int32(_OP, name, value) for name, value in given.items())
    for name, array in (("slots", slots), ("lengths", lengths), ("num_tokens", num_tokens)):
        check_shape(_OP, name, array, (batch,))
    if ancestors is not None:
        check_shape(_OP, "ancestors", ancestors, (batch, width, "offset + T"))
        if ancestors.dtype != jnp.bool_ or ancestors.shape[2] < width:
            came = f"{ancestors.dtype} with {ancestors.shape[2]} columns"
            raise ValueError(f"{_OP}: ancestors is {came}, expected bool with at least T = {width}")
    if since is not None:
        since = as_int32(_OP, "since", since)
        check_shape(_OP, "since", since, (batch, width))
    choice = dispatch.resolve(_OP, implementation, interpret)

    if not query.size:
        return query
    offset = 0 if ancestors is None else ancestors.shape[2] - width
    ends = jnp.where(inside(slots, num_slots), jnp.minimum(lengths + offset + num_tokens, max_len), 0)
    window = Window(slots, lengths, ends, ancestors, since)
    query = query * jnp.asarray(scale, query.dtype)
    if choice.implementation == "triton":
        return triton.attend(query, keys, values, window, kv_len, interpret=interpret)
    # On a GPU the host would have to read a trip count that only the device knows, in every layer.
    ends_early = choice.device.platform == "cpu"
    return reference.attend(query, keys, values, window, kv_len, block, ends_early=ends_early)
