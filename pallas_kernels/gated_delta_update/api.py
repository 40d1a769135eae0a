"""The user functions of the op: checks, then one implementation."""

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_update import triton, triton_chunk
from pallas_kernels.gated_delta_update.recurrence import GatedDelta, Tokens, layout
from pallas_kernels.recurrent import api
from pallas_kernels.recurrent.arguments import Form, StateUpdate, checked_fold, checked_pass
from pallas_kernels.ring import Ring

_OP = "gated_delta_update"
_KERNELS: api.Kernels = {"step": triton, "chunk": triton_chunk}


def gated_delta_update(
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
    snapshots: jax.Array | None = None,
    ring: Ring | None = None,
    fold: jax.Array | None = None,
    disable_state_update: bool = False,
    parents: jax.Array | None = None,
    form: Form = "step",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> StateUpdate:
    """The gated delta rule over T tokens of each row, from the states in one layer of a pool.

        S' = S_{t-1} diag(exp(g_t)),   u_t = beta_t (v_t - S' k_t),   S_t = S' + u_t k_t^T,   o_t = S_t q_t

    with k_t / |k_t| for k_t and scale * q_t / |q_t| for q_t; on a tree, S_{t-1} is the state of the node's parent. The
    gates stand outside, in `gates`, because g and beta are what a ring keeps, final and in float32; the norm stands
    inside, because k is kept as it came. In the shapes below L is layers, S slots, B rows, T tokens, Hk key heads, Hv
    value heads, K and V the sizes of a key and a value; value head h reads key head h // (Hv/Hk). What a pass leaves:

    - by default the state after the row's tokens, in the pool: decoding;
    - with `snapshots`, the state after every token in its layer; the pool stays as it is: a verify to be committed;
    - with `disable_state_update` nothing;
    - with `ring` and `fold`, the T inputs, after each row's history. The outputs then start from the state after the
      history, and rows with `fold` write that state to the pool; afterwards their history is empty, and the caller,
      who has run all layers, moves `starts` by `counts` and counts accepted tokens (`ring.extend`; after a tree,
      `ring.accept_path` before it).

    All arithmetic is float32. In the step form a state is rounded to the pool's dtype after every token, and decode,
    snapshots and replay agree to the bit; the chunked form rounds only what it stores. A row whose slot is out of range
    (-1 is the padding index) has outputs of 0 and leaves nothing. Every other byte of a buffer stays as it is; when the
    caller's jit donates the buffers, they are updated in place. Two rows with one slot leave it undefined.

    Args:
        state: `[L, S, Hv, V, K]`, the pool, float32, bfloat16 or float16; donate it.
        q: `[B, T, Hk, K]`.
        k: `[B, T, Hk, K]`.
        v: `[B, T, Hv, V]`.
        g: `[B, T, Hv]` float32, the logarithm of the decay; `[B, T, Hv, K]` for a decay per key channel (KDA).
        beta: `[B, T, Hv]` float32.
        layer: which layer of every buffer (static).
        slots: `[B]` int32, the slot of each row.
        num_tokens: `[B]` int32; later tokens change nothing, have outputs of 0, and snapshots that hold anything.
        scale: of the queries; K ** -0.5 by default.
        snapshots: `[L, B, T, Hv, V, K]` in the pool's dtype; donate it.
        ring: inputs k `[L, S, Q, Hk, K]`, v `[L, S, Q, Hv, V]`, g and beta `[L, S, Q, Hv]` (g of KDA
            `[L, S, Q, Hv, K]`) in the arguments' dtypes, with Q >= 2 T; a row's count and T together must not pass Q
            (see `ring.must_fold`), and a slot's order is a permutation (see `Ring.empty`). Donate it.
        fold: `[B]` bool, the rows that write the state after their history; required with ring.
        disable_state_update: write outputs only.
        parents: `[B, T]` int32, each node's parent, which comes before it; -1 at a root. None for a chain. A tree has
            no last state, so it needs snapshots, a ring or disable_state_update.
        form: "step", token by token; "chunk", the whole window at once in the WY form.
        implementation: "xla", "triton", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.

    Returns:
        StateUpdate(y, state, snapshots, ring), y `[B, T, Hv, V]` in v's dtype, 0 for tokens past `num_tokens` and for
        rows without a slot.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.

    Source: Yang, Kautz and Hatamizadeh 2024, equation 10; argument names as flash-linear-attention's
    `fused_recurrent_gated_delta_rule`; replay as TensorRT-LLM's and FlashInfer's checkpointed update.
    """
    call = checked_pass(
        _OP,
        layout(_OP, state, per_channel=g.ndim == 4),
        state,
        Tokens(k=k, v=v, g=g, beta=beta, q=q),
        layer=layer,
        slots=slots,
        num_tokens=num_tokens,
        snapshots=snapshots,
        ring=ring,
        fold=fold,
        disable_state_update=disable_state_update,
        parents=parents,
        form=form,
    )
    rule = GatedDelta(k.shape[-1] ** -0.5 if scale is None else scale)
    return api.update(_OP, rule, call, _KERNELS, implementation, interpret)


def fold_history(
    state: jax.Array,
    ring: Ring,
    *,
    layer: int,
    slots: jax.Array,
    num_tokens: jax.Array | None = None,
    to_slots: jax.Array | None = None,
    form: Form = "step",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Writes the state after the first inputs of each row's history: materialises slots, publishes states.

        state[layer, to_slots[b]] = the state of slot slots[b] after num_tokens[b] inputs from its ring's start on

    with the bits that `gated_delta_update` has in the same form. The ring stays as it is: a caller that folds a slot
    into itself moves `starts` and `counts` afterwards. Rows whose slot or target is out of range (-1 is the padding
    index) write nothing. A slot that one row writes and another names ends up undefined.

    Args:
        state: `[L, S, Hv, V, K]`, the pool; donate it.
        ring: as of `gated_delta_update`.
        layer: which layer of pool and ring (static).
        slots: `[B]` int32.
        num_tokens: `[B]` int32, 0..Q, inputs that were only just written included; the counts by default.
        to_slots: `[B]` int32; slots by default.
        form, implementation, interpret: as of `gated_delta_update`.

    Returns:
        state with the folded states written.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.
    """
    per_channel = isinstance(ring.inputs, dict) and "g" in ring.inputs and ring.inputs["g"].ndim == 5
    call = checked_fold(
        _OP,
        layout(_OP, state, per_channel=per_channel),
        state,
        ring,
        Tokens,
        layer=layer,
        slots=slots,
        num_tokens=num_tokens,
        to_slots=to_slots,
        form=form,
    )
    return api.fold_history(_OP, GatedDelta(1.0), call, _KERNELS, implementation, interpret)
