"""The user function of the op: checks, then the computation."""

import jax

from pallas_kernels.selective_state_update import arguments
from pallas_kernels.selective_state_update.recurrence import SSMInputs
from pallas_kernels.selective_state_update.reference import read_states, write_states
from pallas_kernels.ssd_chunk_scan import reference

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
    inputs = SSMInputs(x, dt, B, C)
    arguments.check_state(_OP, state)
    arguments.check_layer(_OP, layer, state.shape[0])
    batch, _ = arguments.check_inputs(_OP, state, inputs, A, D)
    arguments.check_row_values(_OP, batch, slots=slots)
    if chunk_size < 1:
        raise ValueError(f"{_OP}: chunk_size is {chunk_size}, expected 1 or more")
    if x.size == 0:
        return x, state
    y, h = reference.chunk_scan(read_states(state, layer, slots), inputs, A, D, chunk_size)
    return y.astype(x.dtype), write_states(state, layer, slots, h)
