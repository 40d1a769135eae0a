"""The user function of the op: checks, then the computation."""

import jax

from pallas_kernels.arguments import check_layer, check_rows
from pallas_kernels.recurrent.arguments import check_inputs
from pallas_kernels.recurrent.chunks import chunk_scan
from pallas_kernels.recurrent.reference import read_states, write_states
from pallas_kernels.selective_state_update.recurrence import Mamba2, SSMInputs, layout

_OP = "ssd_chunk_scan"


def ssd_chunk_scan(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    *,
    layer: int,
    slots: jax.Array,
    chunk_size: int = 256,
) -> tuple[jax.Array, jax.Array]:
    """Mamba-2's recurrence over a stretch of each row's prompt: outputs, and the pool with the states after it.

    Each row starts from its slot's state in one layer of the pool, and the state goes from chunk to chunk in float32.
    In the shapes below L is layers, S slots, B rows, T tokens, H heads, P head dim, N state, G groups. Rows may have
    fewer than T tokens: dt is 0 after them. A row whose slot is out of range (-1 is
    the padding index) starts from zeros and leaves no state; every other byte of the pool stays as it is.

    Args:
        state: `[L, S, H, P, N]`, the pool; donate it.
        x: `[B, T, H, P]`.
        dt: `[B, T, H]` float32, after bias, softplus and clamp; 0 after a row's tokens.
        A: `[H]` float32, negative.
        B: `[B, T, G, N]`.
        C: `[B, T, G, N]`.
        D: `[H]` float32.
        layer: which layer of the pool (static).
        slots: `[B]` int32, the slot of each row.
        chunk_size: tokens a chunk; the last may be short.

    Returns:
        y `[B, T, H, P]` in x's dtype, and state.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6 (`mamba_chunk_scan_combined` of mamba-ssm).
    """
    inputs, rule = SSMInputs(x, dt, B, C), Mamba2(A, D)
    batch, _ = check_inputs(_OP, layout(_OP, state, rule), state, inputs)
    check_layer(_OP, layer, state.shape[0])
    check_rows(_OP, batch, slots=slots)
    if chunk_size < 1:
        raise ValueError(f"{_OP}: chunk_size is {chunk_size}, expected 1 or more")
    if x.size == 0:
        return x, state
    y, h = chunk_scan(rule, read_states(state, layer, slots), inputs, chunk_size)
    return y.astype(x.dtype), write_states(state, layer, slots, h)
