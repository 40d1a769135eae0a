"""The op as one Triton kernel, for sm_80 and later.

Grid `(C / 256, T / 16, B)`: a program is one warp that owns 256 channels, 8 a thread, and convolves 16 tokens of a row
or, where the conv is wider than that, as many as the old window reaches into; so only the first program of a row and
its channels reads the window, and it is the one that advances it, in place, when it has read all of it. No value
changes threads. Bytes moved: inputs read and outputs written once, the window read once and written once or the record
written once, weights once a program; a token's neighbours come again from L1. The least possible but for the weights,
which L2 holds. Precision: float32 sums of inputs rounded to the pool's dtype, every product rounded.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.compat import triton
from pallas_kernels.entries import inside
from pallas_kernels.launch import THREADS, launch
from pallas_kernels.state_commit.window import taps

_CHANNELS = 256
_TOKENS = 16


class _Reads(NamedTuple):
    """Arrays that the launch reads, or their refs; layer is `[1]`, so that all layers share one kernel."""

    layer: Any
    slots: Any
    x: Any
    weight: Any
    bias: Any
    num_tokens: Any
    parents: Any
    conv_state: Any


class _Buffers(NamedTuple):
    """What the launch updates in place: one of the two."""

    conv_state: Any
    conv_inputs: Any


def update(
    x: jax.Array,
    conv_state: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array | None,
    conv_inputs: jax.Array | None,
    parents: jax.Array | None,
    activation: str | None,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Arguments and results as the reference's, and `interpret`."""
    B, T, C = x.shape
    width, num_slots, dtype = weight.shape[0], conv_state.shape[1], conv_state.dtype
    block, stretch = max(THREADS, min(_CHANNELS, pl.next_power_of_2(C))), max(_TOKENS, width - 1)

    def causal_conv1d_update_kernel(reads, y_ref, buffers):
        part, first, row = pl.program_id(0), pl.program_id(1) * stretch, pl.program_id(2)
        layer, slot = reads.layer[0], reads.slots[row]
        channels = part * block + jnp.arange(block, dtype=jnp.int32)
        owned = channels < C
        exists = inside(slot, num_slots)
        window_ref = reads.conv_state if buffers.conv_state is None else buffers.conv_state
        place = layer, jnp.where(exists, slot, 0)

        def load(ref, *at, where=True):
            return triton.load(ref.at[(*at, channels)], mask=owned & where, other=0)

        def column(i):
            """Column i of the old window followed by the inputs, in the pool's dtype."""
            new = load(reads.x, row, jnp.maximum(i - (width - 1), 0), where=i >= width - 1).astype(dtype)
            if width == 1:
                return new
            old = load(window_ref, *place, jnp.minimum(i, width - 2), where=exists & (i < width - 1))
            return jnp.where(i < width - 1, old, new)

        def parent_of(node):
            return node - 1 if reads.parents is None else reads.parents[row, node]

        weights = [load(reads.weight, jnp.int32(tap)).astype(jnp.float32) for tap in range(width)]
        bias = None if reads.bias is None else load(reads.bias).astype(jnp.float32)

        def convolve(t, _):
            total = jnp.zeros(block, jnp.float32)
            # Taps count from a window of `width` columns, whose first the token itself has pushed out.
            for tap, tap_weight in zip(taps(t, parent_of, width), weights, strict=True):
                total += column(tap - 1).astype(jnp.float32) * tap_weight
            if bias is not None:
                total += bias
            y = total if activation is None else total * jax.nn.sigmoid(total)
            triton.store(y_ref.at[row, t, channels], y.astype(y_ref.dtype), mask=owned)
            if buffers.conv_inputs is not None:
                own = column(t + width - 1)
                triton.store(buffers.conv_inputs.at[layer, row, t, channels], own, mask=owned)

        lax.fori_loop(first, jnp.minimum(first + stretch, T), convolve, None)
        if buffers.conv_state is not None:

            @pl.when(exists & (first == 0))
            def _():
                count = T if reads.num_tokens is None else jnp.clip(reads.num_tokens[row], 0, T)
                columns = [column(count + j) for j in range(width - 1)]
                for j, values in enumerate(columns):
                    triton.store(window_ref.at[(*place, jnp.int32(j), channels)], values, mask=owned)

    advances = conv_inputs is None and width > 1  # without neighbours there is no window, and no pool to point at
    y, buffers = launch(
        causal_conv1d_update_kernel,
        (pl.cdiv(C, block), pl.cdiv(T, stretch), B),
        _Reads(
            jnp.full(1, layer, jnp.int32),
            slots,
            x,
            weight,
            bias,
            num_tokens if advances else None,
            parents,
            None if advances or width == 1 else conv_state,
        ),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        _Buffers(conv_state if advances else None, conv_inputs),
        num_warps=1,
        interpret=interpret,
    )
    return y, buffers.conv_state if advances else conv_state, buffers.conv_inputs
