"""The user function of the op: checks, then one implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_update import reference
from pallas_kernels.gated_delta_update.checks import check_mode, check_rows
from pallas_kernels.gated_delta_update.recurrence import Tokens
from pallas_kernels.gated_delta_update.reference import Call, Updated
from pallas_kernels.ring import Ring

_OP = "gated_delta_update"


def gated_delta_update(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    slots: jax.Array,
    num_tokens: jax.Array,
    *,
    layer: int,
    scale: float | None = None,
    snapshots: jax.Array | None = None,
    ring: Ring | None = None,
    fold: jax.Array | None = None,
    parents: jax.Array | None = None,
    disable_state_update: bool = False,
    chunked: bool = False,
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> Updated:
    """The gated delta rule over T tokens of each row, from the state of the row's slot in one layer.

        S' = S_{t-1} diag(exp(g_t)),   u_t = beta_t (v_t - S' k_t),   S_t = S' + u_t k_t^T,   o_t = S_t q_t

    with k_t / |k_t| for k_t and scale * q_t / |q_t| for q_t. The gates stand outside, in `gates`, because g and beta
    are what a ring keeps, final and in float32; the norm stands inside, because k is kept as it came. The state is
    rounded to its dtype after every token, so a token has the same bits in every mode but `chunked`.

    What becomes of the states, B being rows, L layers, S slots, Q the ring's length:

    | passed                 | the pool holds afterwards                        | besides                         |
    | ---------------------- | ------------------------------------------------ | ------------------------------- |
    | nothing                | the state behind the row's tokens                |                                 |
    | `disable_state_update` | what it held                                     |                                 |
    | `snapshots`            | what it held                                     | the state after every token     |
    | `ring`, `fold`         | for rows of fold the state behind their history, | the tokens' inputs behind the   |
    |                        | for others what it held                          | history, which they start from  |

    A ring's cursors come back as they came: moving them is accepting. A row that folds with no tokens is materialised.

    Args:
        state: `[L, S, Hv, V, K]`, the pool, float32, bfloat16 or float16; donate it.
        q, k: `[B, T, Hk, K]`; Hk divides Hv, and value head h reads key head h // (Hv / Hk).
        v: `[B, T, Hv, V]`.
        g: `[B, T, Hv]` float32, the decay's logarithm; `[B, T, Hv, K]` for a decay per key channel (KDA).
        beta: `[B, T, Hv]` float32.
        slots: `[B]` int32; rows whose slot is out of range are skipped (-1 is the padding index), their outputs are 0.
            Rows that share a slot leave it undefined.
        num_tokens: `[B]` int32; later tokens change nothing, their outputs are 0, their snapshots hold anything.
        layer: which layer, static.
        scale: of the queries; K ** -0.5 by default.
        snapshots: `[L, B, T, Hv, V, K]` in the pool's dtype, of all layers; donate it.
        ring: inputs `{"k", "v", "g", "beta"}`, each `[L, S, Q, ...]` in the argument's dtype, with Q >= 2 T; donate it.
        fold: `[B]` bool, from `ring.must_fold`.
        parents: `[B, T]` int32, each node's parent, which comes before it; -1 at the root. None for a chain.
        disable_state_update: outputs only.
        chunked: solve the window at once instead of token by token: cheaper for many tokens and trees, and equal to
            rounding (1e-5). The history is folded token by token all the same.
        implementation: "xla", "triton", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.

    Returns:
        `Updated(o, state, snapshots, ring)`.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.

    Source: Yang, Kautz and Hatamizadeh 2024, equation 10; argument names as flash-linear-attention's
    `fused_recurrent_gated_delta_rule`; checkpointed rings as FlashInfer's `checkpointing_ssu`.
    """
    tokens = Tokens(k=k, v=v, g=g, beta=beta, q=q)
    check_rows(_OP, state, tokens, slots, num_tokens, layer)
    call = Call(
        state=state,
        tokens=tokens,
        slots=slots,
        num_tokens=jnp.clip(num_tokens, 0, k.shape[1]),
        layer=layer,
        scale=k.shape[-1] ** -0.5 if scale is None else scale,
        advance=snapshots is None and ring is None and not disable_state_update,
        snapshots=snapshots,
        ring=ring,
        fold=fold,
        parents=parents,
        chunked=chunked,
    )
    check_mode(_OP, call, disable_state_update)
    dispatch.resolve(_OP, implementation, interpret)
    return reference.update(call)
