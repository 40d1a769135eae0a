"""The user functions of the op: checks, then one implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.arguments import check_parents, check_shape
from pallas_kernels.dispatch import Implementation
from pallas_kernels.ring import Ring
from pallas_kernels.selective_state_update import arguments, reference, triton, triton_chunk
from pallas_kernels.selective_state_update.arguments import Form, StateUpdate
from pallas_kernels.selective_state_update.recurrence import SSMInputs
from pallas_kernels.tree import earlier_parents

_OP = "selective_state_update"


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
    inputs = SSMInputs(x, dt, B, C)
    arguments.check_state(_OP, state)
    arguments.check_layer(_OP, layer, state.shape[0])
    arguments.check_form(_OP, form)
    batch, tokens = arguments.check_inputs(_OP, state, inputs, A, D)
    arguments.check_row_values(_OP, batch, slots=slots)
    _check_kept(state, inputs, snapshots, ring, fold, disable_state_update)
    writes_state = snapshots is None and ring is None and not disable_state_update
    if parents is not None:
        parents = earlier_parents(check_parents(_OP, parents, batch, tokens))
        if writes_state:
            raise ValueError(
                f"{_OP}: a tree has no last state to write; pass snapshots, ring or disable_state_update with parents"
            )
    options: dict[str, Any] = {
        "layer": layer,
        "slots": slots,
        "snapshots": snapshots,
        "ring": ring,
        "fold": fold,
        "writes_state": writes_state,
    }
    choice = dispatch.resolve(_OP, implementation, interpret)
    if x.size == 0:
        return StateUpdate(x, state, snapshots, ring)
    if choice.implementation == "triton":
        update = triton.update if form == "step" else triton_chunk.update
        return update(state, inputs, A, D, **options, parents=parents, interpret=interpret)
    return reference.update(state, inputs, A, D, **options, parents=parents, form=form)


def fold_history(
    state: jax.Array,
    ring: Ring,
    A: jax.Array,
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

    with the bits that `selective_state_update` has in the same form. The ring stays as it is: a caller that folds a
    slot into itself moves `starts` and `counts` afterwards. Rows whose slot or target is out of range (-1 is the
    padding index) write nothing. A slot that one row writes and another names ends up undefined.

    Args:
        state: `[L, S, H, P, N]`, the pool; donate it.
        ring: as of `selective_state_update`.
        A: `[H]` float32, the layer's.
        layer: which layer of pool and ring (static).
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
    arguments.check_state(_OP, state)
    arguments.check_layer(_OP, layer, state.shape[0])
    arguments.check_form(_OP, form)
    arguments.check_ring(_OP, state, ring)
    arguments.check_heads(_OP, state.shape[2], A=A)
    arguments.check_row_values(_OP, slots.size, slots=slots)
    to_slots = slots if to_slots is None else to_slots
    arguments.check_row_values(_OP, slots.size, to_slots=to_slots)
    if num_tokens is not None:
        arguments.check_row_values(_OP, slots.size, num_tokens=num_tokens)
    options: dict[str, Any] = {"layer": layer, "slots": slots, "to_slots": to_slots, "num_tokens": num_tokens}
    choice = dispatch.resolve(_OP, implementation, interpret)
    if slots.size == 0:
        return state
    if choice.implementation == "triton":
        fold = triton.fold_history if form == "step" else triton_chunk.fold_history
        return fold(state, ring, A, **options, interpret=interpret)
    return reference.fold_history(state, ring, A, **options, form=form)


def _check_kept(
    state: jax.Array,
    inputs: SSMInputs,
    snapshots: jax.Array | None,
    ring: Ring | None,
    fold: Any,
    disable_state_update: bool,
) -> None:
    """A pass writes one of state, snapshots and ring, and its shape fits."""
    kept = {"snapshots": snapshots is not None, "ring": ring is not None, "disable_state_update": disable_state_update}
    if sum(kept.values()) > 1:
        named = " and ".join(name for name, given in kept.items() if given)
        raise ValueError(f"{_OP}: {named} are given; expected one of them at most, as they exclude each other")
    if (ring is None) != (fold is None):
        raise ValueError(f"{_OP}: {'ring' if ring is None else 'fold'} is None; pass ring and fold together")
    batch, tokens = inputs.x.shape[:2]
    if snapshots is not None:
        check_shape(_OP, "snapshots", snapshots, (state.shape[0], batch, tokens, *state.shape[2:]))
        arguments.check_dtype(_OP, "snapshots", snapshots, state.dtype)
    if ring is not None:
        arguments.check_ring(_OP, state, ring)
        arguments.check_kept(_OP, ring, inputs)
        arguments.check_row_values(_OP, batch, jnp.bool_, fold=fold)
