"""The user functions of the op: checks, then one implementation."""

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.recurrent import api
from pallas_kernels.recurrent.arguments import Form, StateUpdate, checked_fold, checked_pass
from pallas_kernels.ring import Ring
from pallas_kernels.selective_state_update import triton, triton_chunk
from pallas_kernels.selective_state_update.recurrence import Mamba2, SSMInputs, layout

_OP = "selective_state_update"
_KERNELS: api.Kernels = {"step": triton, "chunk": triton_chunk}


def selective_state_update(
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
    form: Form = "step",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> StateUpdate:
    """Mamba-2's recurrence over T tokens of each row, from the states in one layer of a pool.

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t            h: [P, N] per head

    In the shapes below L is layers, S slots, B rows, T tokens, H heads, P head dim, N state, G groups; head h reads
    group h // (H/G). On a tree, h_{t-1} is the state of the node's parent. What a pass writes:

    - by default the state after the T tokens, in the pool: decoding;
    - with `snapshots`, the state after every token in its layer; the pool stays as it is: a verify to be committed;
    - with `disable_state_update` nothing;
    - with `ring` and `fold`, the T inputs, after each row's history. The outputs then start from the state after the
      history, and rows with `fold` write that state to the pool; afterwards their history is empty, and the caller,
      who has run all layers, moves `starts` by `counts` and counts accepted tokens (`ring.extend`; after a tree,
      `ring.accept_path` before it).

    All arithmetic is float32. In the step form a state is rounded to the pool's dtype after every token, and decode,
    snapshots and replay agree to the bit; the chunked form rounds only what it stores. A token with dt = 0 leaves the
    state as it is, whatever its x and B. What a token computes changes no token that does not descend from it, NaN and
    infinity included. A row whose slot is out of range (-1 is the padding index) starts from
    zeros and leaves no state. Every other byte of a buffer stays as it is; when the caller's jit donates the buffers,
    they are updated in place. Two rows with one slot leave it undefined.

    Args:
        state: `[L, S, H, P, N]`, the pool, float32, bfloat16 or float16; donate it.
        x: `[B, T, H, P]`.
        dt: `[B, T, H]` float32, after bias, softplus and clamp; 0 for tokens that are not real.
        A: `[H]` float32, negative.
        B: `[B, T, G, N]`.
        C: `[B, T, G, N]`.
        D: `[H]` float32.
        layer: which layer of every buffer (static).
        slots: `[B]` int32, the slot of each row.
        snapshots: `[L, B, T, H, P, N]` in the pool's dtype; donate it.
        ring: inputs x `[L, S, Q, H, P]` in x's dtype, dt `[L, S, Q, H]` float32 and B `[L, S, Q, G, N]` in B's dtype,
            with Q >= 2 T; a row's count and T together must not pass Q (see `ring.must_fold`), and a slot's order is
            a permutation (see `Ring.empty`). Donate it.
        fold: `[B]` bool, the rows that write the state after their history; required with ring.
        disable_state_update: write outputs only.
        parents: `[B, T]` int32, each node's parent, which comes before it; -1 at a root. None for a chain. A tree has
            no last state, so it needs snapshots, a ring or disable_state_update.
        form: "step", token by token; "chunk", the whole window at once in the state-space dual form.
        implementation: "xla", "triton", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.

    Returns:
        StateUpdate(y, state, snapshots, ring).

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.

    Source: Dao and Gu 2024, "Transformers are SSMs"; replay as TensorRT-LLM's and FlashInfer's checkpointed update.
    """
    rule = Mamba2(A, D)
    call = checked_pass(
        _OP,
        layout(_OP, state, rule),
        state,
        SSMInputs(x, dt, B, C),
        layer=layer,
        slots=slots,
        num_tokens=None,
        snapshots=snapshots,
        ring=ring,
        fold=fold,
        disable_state_update=disable_state_update,
        parents=parents,
        form=form,
    )
    return api.update(_OP, rule, call, _KERNELS, implementation, interpret)


def fold_history(
    state: jax.Array,
    ring: Ring,
    A: jax.Array,
    *,
    layer: int | jax.Array,
    slots: jax.Array,
    num_tokens: jax.Array | None = None,
    to_slots: jax.Array | None = None,
    form: Form = "step",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Writes the state after the first inputs of each row's history: materialises slots, publishes states.

        state[layer, to_slots[b]] = the state of slot slots[b] after num_tokens[b] inputs from its ring's start on

    with the bits that `selective_state_update` has in the same form. The ring stays as it is: a caller that folds a
    slot into itself moves `starts` and `counts` afterwards. Rows whose slot or target is out of range (-1 is the
    padding index) write nothing. A slot that one row writes and another names ends up undefined.

    Args:
        state: `[L, S, H, P, N]`, the pool; donate it.
        ring: as of `selective_state_update`.
        A: `[H]` float32, the layer's.
        layer: which layer of pool and ring: an int, or an int32 scalar.
        slots: `[B]` int32.
        num_tokens: `[B]` int32, 0..Q, inputs that were only just written included; the counts by default.
        to_slots: `[B]` int32; slots by default.
        form, implementation, interpret: as of `selective_state_update`.

    Returns:
        state with the folded states written.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        NotImplementedError: a named implementation that the device cannot run.
    """
    rule = Mamba2(A)
    call = checked_fold(
        _OP,
        layout(_OP, state, rule),
        state,
        ring,
        SSMInputs,
        layer=layer,
        slots=slots,
        num_tokens=num_tokens,
        to_slots=to_slots,
        form=form,
    )
    return api.fold_history(_OP, rule, call, _KERNELS, implementation, interpret)
