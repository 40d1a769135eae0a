"""The user function of the op: checks, then one implementation."""

import jax

from pallas_kernels.mamba1_state_update.recurrence import Mamba1, Mamba1Inputs, layout
from pallas_kernels.recurrent import reference
from pallas_kernels.recurrent.arguments import StateUpdate, checked_pass
from pallas_kernels.ring import Ring

_OP = "mamba1_state_update"


def mamba1_state_update(
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
    snapshots: jax.Array | None = None,
    ring: Ring | None = None,
    fold: jax.Array | None = None,
    disable_state_update: bool = False,
    parents: jax.Array | None = None,
) -> StateUpdate:
    """Mamba-1's recurrence over T tokens of each row, from the states in one layer of a pool.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t        h, A: [C, N]; dt, x: [C]

    In the shapes below L is layers, S slots, B rows, T tokens, C channels, N state. All else is as
    `selective_state_update` describes it for its step form: what a pass writes, rings, trees, donation, and that
    decode, snapshots and replay agree to the bit.

    Args:
        state: `[L, S, 1, C, N]`, the pool, float32, bfloat16 or float16; donate it.
        x: `[B, T, C]`.
        dt: `[B, T, C]` float32, after bias and softplus; 0 for tokens that are not real, which must be finite.
        A: `[C, N]` float32, negative.
        B: `[B, T, N]`.
        C: `[B, T, N]`.
        D: `[C]` float32.
        layer: which layer of every buffer (static).
        slots: `[B]` int32, the slot of each row.
        snapshots: `[L, B, T, 1, C, N]` in the pool's dtype; donate it.
        ring: inputs x `[L, S, Q, C]` in x's dtype, dt `[L, S, Q, C]` float32 and B `[L, S, Q, N]` in B's dtype.
        fold, disable_state_update, parents: as of `selective_state_update`.

    Returns:
        StateUpdate(y, state, snapshots, ring), y `[B, T, C]` in x's dtype.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.

    Source: Gu and Dao 2023, "Mamba: Linear-time sequence modeling with selective state spaces".
    """
    rule = Mamba1(A, D)
    call = checked_pass(
        _OP,
        layout(_OP, state, rule),
        state,
        Mamba1Inputs(x, dt, B, C),
        layer=layer,
        slots=slots,
        num_tokens=None,
        snapshots=snapshots,
        ring=ring,
        fold=fold,
        disable_state_update=disable_state_update,
        parents=parents,
        form="step",
    )
    return reference.update(rule, call)
