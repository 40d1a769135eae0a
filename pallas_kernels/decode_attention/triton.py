"""The op as Triton kernels, for sm_80 and later: keys split over programs, then their parts combined.

Grid `(splits x tiles, Hkv, B)`: a program attends one tile of the `T x (Hq / Hkv)` queries that share a key head to
one chunk of the row's positions, block by block (online softmax). Chunk boundaries do not depend on the row's length:
a token's sums have one order in every pass over the same buffers. Where there is one chunk the result is written at
once, else grid `(Hq / Hkv x T, Hkv, B)` combines the parts of each query in one tile. Blocks, for heads of 128: 64 keys
and up to 64 queries, padded to 16; of 256: half as many. Bytes moved: keys and values of committed rows and of the
window once a tile, the least possible up to 64 (32) queries a head, and tiles of one head run side by side, so that the
L2 cache serves them; parts of `4 (Dh + 2)` bytes a query and chunk written and read once; every trip count is the row's
own. Precision: products of 16-bit values by tensor cores, of float32 values in float32, sums in float32; weights are
rounded to the values' dtype before they meet, as in `reference.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.decode_attention.window import Window
from pallas_kernels.launch import result_shapes
from pallas_kernels.selection import finite

_MOST_QUERIES = 64
_MOST_KEYS = 128
_MOST_CHUNKS = 64
_PROGRAMS = 512  # four for each multiprocessor of the largest device
_BLOCK_BYTES = 16 * 1024  # of keys
_TILE_BYTES = 32 * 1024  # of queries; a quarter of it in float32, whose products no tensor core makes
_WORD_BITS = 5
_WORD = 1 << _WORD_BITS  # nodes of a tree in one word of its mask

_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.F32_F32_F32,
}


class Plan(NamedTuple):
    """How one call is divided; all static.

    Attributes:
        group: query heads of a key head.
        width: T.
        size: Dh; padded: the next power of two.
        tile: queries of a program; tiles: how many of them hold a row's queries of one key head.
        block: keys visited at once.
        chunk: positions of one split, a multiple of block; chunks: how many there are, which depends on the buffers.
        splits: how many of them `kv_len` reaches into.
        interpret: whether a CPU runs it.
    """

    group: int
    width: int
    size: int
    padded: int
    tile: int
    tiles: int
    block: int
    chunk: int
    chunks: int
    splits: int
    interpret: bool

    @property
    def warps(self) -> int:
        """Enough that 64 registers a thread hold the sums of a tile."""
        return 8 if self.tile * self.padded >= 64 * 128 else 4


def plan(
    query_shape: tuple[int, ...], buffer_shape: tuple[int, ...], kv_len: int, itemsize: int, interpret: bool
) -> Plan:
    """The division for a query `[B, T, Hq, Dh]` and buffers `[S, M, Hkv, Dh]` of `itemsize` bytes at most."""
    batch, width, heads, size = query_shape
    _, max_len, kv_heads, _ = buffer_shape
    group, padded = heads // kv_heads, max(16, pl.next_power_of_2(size))
    most = max(16, min(_TILE_BYTES // (itemsize**2 * padded), _MOST_QUERIES))
    tile = min(max(16, pl.next_power_of_2(width * group)), most)
    tiles = pl.cdiv(width * group, tile)
    block = min(max(16, _BLOCK_BYTES // (itemsize * padded)), _MOST_KEYS)
    wanted = min(pl.cdiv(_PROGRAMS, batch * kv_heads * tiles), _MOST_CHUNKS)
    # So long that its parts, written and read again, are a quarter of its keys and values at most.
    chunk = pl.cdiv(max(pl.cdiv(max_len, wanted), 8 * tile), block) * block
    chunks, splits = pl.cdiv(max_len, chunk), pl.cdiv(kv_len, chunk)
    return Plan(group, width, size, padded, tile, tiles, block, chunk, chunks, splits, interpret)


def attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, window: Window, kv_len: int, *, interpret: bool
) -> jax.Array:
    """`[B, T, Hq, Dh]` from the scaled query `[B, T, Hq, Dh]` and buffers `[S, M, Hkv, Dh]`."""
    B, _, heads, _ = query.shape
    kv_heads = keys.shape[2]
    division = plan(query.shape, keys.shape, kv_len, max(query.dtype.itemsize, keys.dtype.itemsize), interpret)
    rows = window._replace(ancestors=None if window.ancestors is None else _packed(window.ancestors))
    attention = functools.partial(_launch, division, rows)
    grid = (division.splits * division.tiles, kv_heads, B)
    output = jax.ShapeDtypeStruct(query.shape, query.dtype)
    if division.splits == 1:
        return attention(_attend_kernel, grid, (query, keys, values), (output,))[0]
    part = (B, heads, division.width, division.splits)
    parts = (
        *(jax.ShapeDtypeStruct(part, jnp.float32) for _ in range(2)),
        jax.ShapeDtypeStruct((*part, division.size), jnp.float32),
    )
    written = attention(_attend_kernel, grid, (query, keys, values), parts)
    return attention(_combine_kernel, (division.group * division.width, kv_heads, B), tuple(written), (output,))[0]


def _launch(division: Plan, window: Window, kernel, grid, sources, outputs) -> list[jax.Array]:
    inputs = (window, sources)
    structure, count = jax.tree.structure(inputs), len(jax.tree.leaves(inputs))

    def flat_kernel(*refs):
        window_refs, source_refs = jax.tree.unflatten(structure, refs[:count])
        kernel(division, window_refs, source_refs, refs[count:])

    flat_kernel.__name__ = f"decode_attention{kernel.__name__}"
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        flat_kernel,
        grid=grid,
        in_specs=[anywhere] * count,
        out_specs=[anywhere] * len(outputs),
        out_shape=result_shapes(list(outputs), jax.tree.leaves(inputs)),
        compiler_params=triton.CompilerParams(num_warps=division.warps, num_stages=2),
        interpret=division.interpret,
    )(*jax.tree.leaves(inputs))


def _attend_kernel(division: Plan, window: Window, sources: Any, outputs: Any) -> None:
    precision = functools.partial(_precision, interpret=division.interpret)
    query_ref, key_ref, value_ref = sources
    split, tile = pl.program_id(0) // division.tiles, pl.program_id(0) % division.tiles
    kv_head, b = pl.program_id(1), pl.program_id(2)
    end = _end_of(division, tile, window, b)
    first = split * division.chunk

    index = tile * division.tile + jnp.arange(division.tile, dtype=jnp.int32)
    exists = index < division.width * division.group
    # Past T where the query does not exist, never another's: the interpreter also stores what is masked out.
    token = index // division.group
    head = kv_head * division.group + index % division.group
    channel = jnp.arange(division.padded, dtype=jnp.int32)
    at, within = (b, token[:, None], head[:, None], channel[None]), exists[:, None] & (channel < division.size)[None]

    def attend():
        query = triton.load(query_ref.at[at], mask=within, other=0)
        sees = _sight(division, window, b, token)
        slot = window.slots[b]
        common = jnp.promote_types(query.dtype, key_ref.dtype)
        dot = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)

        def visit(step, carry):
            top, total, mixed = carry
            position = first + step * division.block + jnp.arange(division.block, dtype=jnp.int32)
            written = position < end
            read = functools.partial(triton.load, mask=written[:, None] & (channel < division.size)[None], other=0)
            rows = (slot, position[:, None], kv_head, channel[None])
            k, v = read(key_ref.at[rows]), read(value_ref.at[rows])
            scores = dot(query.astype(common), k.astype(common), (((1,), (1,)), ((), ())), precision=precision(common))
            # Weights of 0 do not take back what is not finite: it is left out, and the tokens that see it are NaN.
            scores = scores + jnp.sum(v * 0, axis=1, dtype=v.dtype)[None].astype(scores.dtype)
            scores = jnp.where(written[None] & sees(position), scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            safe_top = jnp.where(new_top > -jnp.inf, new_top, 0)
            weights = jnp.exp(scores - safe_top[:, None])
            keep = jnp.exp(top - safe_top)
            update = dot(weights.astype(v.dtype), finite(v), (((1,), (0,)), ((), ())), precision=precision(v.dtype))
            return new_top, total * keep + jnp.sum(weights, axis=1), mixed * keep[:, None] + update

        blocks = pl.cdiv(jnp.minimum(end - first, division.chunk), division.block)
        begin: jax.Array | int = 0
        if window.since is not None:
            since = triton.load(window.since.at[b, token], mask=exists, other=jnp.iinfo(jnp.int32).max)
            begin = jnp.clip((jnp.min(since) - first) // division.block, 0, blocks)
        none = jnp.zeros(division.tile, jnp.float32)
        carry = (none - jnp.inf, none, jnp.zeros((division.tile, division.padded), jnp.float32))
        top, total, mixed = jax.lax.fori_loop(begin, blocks, visit, carry)
        if division.splits == 1:
            mixed = mixed / jnp.where(total > 0, total, 1)[:, None]
            triton.store(outputs[0].at[at], mixed.astype(outputs[0].dtype), mask=within)
            return
        top_ref, total_ref, mixed_ref = outputs
        triton.store(top_ref.at[b, head, token, split], top, mask=exists)
        triton.store(total_ref.at[b, head, token, split], total, mask=exists)
        triton.store(mixed_ref.at[b, head[:, None], token[:, None], split, channel[None]], mixed, mask=within)

    if division.splits == 1:
        attend()  # rows that see nothing give zeros
    else:
        pl.when(first < end)(attend)


def _combine_kernel(division: Plan, window: Window, sources: Any, outputs: Any) -> None:
    """One query: its parts, those of the chunks that its tile has read, in one tile."""
    top_ref, total_ref, mixed_ref = sources
    index, kv_head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    end = _end_of(division, index // division.tile, window, b)
    token, head = index // division.group, kv_head * division.group + index % division.group
    # As many as the buffers have, whatever kv_len is: the sums below keep their order.
    split = jnp.arange(pl.next_power_of_2(division.chunks), dtype=jnp.int32)
    channel = jnp.arange(division.padded, dtype=jnp.int32)
    present, within = split * division.chunk < end, channel < division.size
    top = triton.load(top_ref.at[b, head, token, split], mask=present, other=-jnp.inf)
    total = triton.load(total_ref.at[b, head, token, split], mask=present, other=0)
    mixed = triton.load(
        mixed_ref.at[b, head, token, split[:, None], channel[None]], mask=present[:, None] & within[None], other=0
    )
    highest = jnp.max(top)
    weight = jnp.exp(top - jnp.where(highest > -jnp.inf, highest, 0))
    total = jnp.sum(weight * total)
    result = jnp.sum(weight[:, None] * mixed, axis=0) / jnp.where(total > 0, total, 1)
    triton.store(outputs[0].at[b, token, head, channel], result.astype(outputs[0].dtype), mask=within)


def _end_of(division: Plan, tile: jax.Array, window: Window, b: jax.Array) -> jax.Array:
    """Where the positions end that a tile looks at: those of the row, and of a chain up to its last token's own."""
    end = jnp.minimum(window.ends[b], division.splits * division.chunk)
    if window.ancestors is not None:
        return end
    last = ((tile + 1) * division.tile - 1) // division.group
    return jnp.minimum(end, window.lengths[b] + last + 1)


def _sight(division: Plan, window: Window, b: jax.Array, token: jax.Array):
    """What says which positions `[block]` each query of a tile may look at, `[tile, block]`."""
    before = _predecessors(division, window, b, token)
    if window.since is None:
        return before
    since = triton.load(window.since.at[b, token], mask=token < division.width, other=0)
    return lambda position: before(position) & (position[None] >= since[:, None])


def _predecessors(division: Plan, window: Window, b: jax.Array, token: jax.Array):
    """The same without a sliding window."""
    length = window.lengths[b]
    if window.ancestors is None:
        return lambda position: position[None] <= (length + token)[:, None]
    words = [
        triton.load(window.ancestors.at[b, token, jnp.int32(w)], mask=token < division.width, other=0)
        for w in range(window.ancestors.shape[2])
    ]

    def sees(position):
        node = position - length
        visible = jnp.broadcast_to((node < 0)[None], (division.tile, division.block))
        for w, word in enumerate(words):
            seen = (word[:, None] >> (node & (_WORD - 1))[None]) & 1
            visible |= (seen == 1) & (node >> _WORD_BITS == w)[None]
        return visible

    return sees


def _packed(ancestors: jax.Array) -> jax.Array:
    """`[B, T, words]` int32, node j of `[B, T, nodes]` being bit `j % 32` of word `j // 32`."""
    nodes = ancestors.shape[2]
    words = pl.cdiv(nodes, _WORD)
    padded = jnp.pad(ancestors, ((0, 0), (0, 0), (0, words * _WORD - nodes)))
    values = jnp.uint32(1) << jnp.arange(_WORD, dtype=jnp.uint32)
    bits = padded.reshape(*ancestors.shape[:2], words, _WORD).astype(jnp.uint32) * values[None, None, None]
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)


def _precision(dtype: Any, interpret: bool) -> jax.lax.Precision | jax.lax.DotAlgorithmPreset:
    """The dot of one dtype, named, since the default of float32 is one TF32 product; the CPU knows few by name."""
    return jax.lax.Precision.HIGHEST if interpret else _ALGORITHMS[jnp.dtype(dtype).name]
