"""The user function of the op: checks, then the only implementation, which every device runs."""

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_layer, check_rows
from pallas_kernels.entries import inside
from pallas_kernels.gated_delta_update.recurrence import GatedDelta, Tokens, layout
from pallas_kernels.recurrent.arguments import check_inputs
from pallas_kernels.recurrent.chunks import chunk_scan
from pallas_kernels.recurrent.reference import only_first, read_states, write_states

_OP = "gated_delta_chunk"

# A decay per channel makes the scores of a chunk K times as many numbers, for a moment.
_CHUNK, _CHUNK_PER_CHANNEL = 64, 16


def gated_delta_chunk(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array,
    scale: float | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over a prompt: outputs, and the pool with the state after each row's tokens.

    The recurrence of `gated_delta_update`, a chunk at a time (WY form); equal to it to rounding (1e-5). The state is
    carried in float32 and rounded to the pool's dtype once, at the end.

    Args:
        state, q, k, v, g, beta, layer, slots, scale: as `gated_delta_update`'s; T may be any number.
        num_tokens: `[B]` int32; later tokens change nothing, and their outputs are 0.
        chunk_size: tokens a chunk; by default 64, and 16 with a decay per key channel.

    Returns:
        (o, state): `[B, T, Hv, V]` in v's dtype, and the pool, in its own buffer if it was donated.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.

    Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", with the gates of Yang, Kautz and
    Hatamizadeh 2024; argument names as flash-linear-attention's `chunk_gated_delta_rule`.
    """
    tokens = Tokens(k=k, v=v, g=g, beta=beta, q=q)
    batch, _ = check_inputs(_OP, layout(_OP, state, per_channel=g.ndim == 4), state, tokens)
    check_layer(_OP, layer, state.shape[0])
    check_rows(_OP, batch, slots=slots, num_tokens=num_tokens)
    if chunk_size is None:
        chunk_size = _CHUNK_PER_CHANNEL if g.ndim == 4 else _CHUNK
    if chunk_size < 1:
        raise ValueError(f"{_OP}: chunk_size is {chunk_size}, expected 1 at least")
    if v.size == 0 or state.size == 0:
        return v, state
    tokens = only_first(tokens, jnp.where(inside(slots, state.shape[1]), num_tokens, 0))
    rule = GatedDelta(k.shape[-1] ** -0.5 if scale is None else scale)
    o, after = chunk_scan(rule, read_states(state, layer, slots), tokens, chunk_size)
    return o.astype(v.dtype), write_states(state, layer, slots, after)
