"""The user function of the op: checks, then one implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.arguments import Indices, check_indices, check_leaves, check_parents, pair_leaves
from pallas_kernels.dispatch import Choice, Implementation
from pallas_kernels.state_commit import mosaic_gpu, reference, triton
from pallas_kernels.validation import check_values

_OP = "state_commit"


def state_commit(
    ssm: Any,
    conv: Any,
    ssm_states: Any,
    conv_inputs: Any,
    slots: jax.Array,
    steps: jax.Array,
    *,
    parents: jax.Array | None = None,
    rows: jax.Array | None = None,
    track_slots: jax.Array | None = None,
    track_steps: jax.Array | None = None,
    implementation: Implementation | None = None,
    interpret: bool = False,
    validate: bool = False,
) -> tuple[Any, Any]:
    """Brings each entry's slot to the state after node `steps[i]` of its verify pass: SSM states and conv windows.

        ssm[l, slots[i]]  = ssm_states[l, rows[i], steps[i]]
        conv[l, slots[i]] = last W-1 of (conv[l, slots[i]] ++ conv_inputs[l, rows[i]] along the path root..steps[i])

    and the same for the tracked set, whose window starts from the live slot's old one, before this commit. In the
    shapes below, L is layers, S slots, R source rows, T nodes, B entries, W conv width, C channels. An entry whose live
    slot, row or node is out of range is skipped (-1 is the padding index); its tracked state needs the live slot, the
    row, and its own slot and node in range. All other bytes stay as they are. When the caller's jit donates the pools,
    nothing is copied. A slot written by one entry and named by another, live or tracked, ends up undefined.

    Args:
        ssm: pytree of `[L, S, *x]`, the SSM pool; donate it. It may have no leaves if `conv` has some.
        conv: pytree of `[L, S, W-1, C]`, the conv pool; donate it. It may have no leaves if `ssm` has some.
        ssm_states: pytree like ssm, `[L, R, T, *x]`, the state after each node.
        conv_inputs: pytree like conv, `[L, R, T, C]`, the convolution's raw input at each node.
        slots: `[B]` int32, the slot each entry commits to.
        steps: `[B]` int32, the last accepted node of each entry.
        parents: `[B, T]` int32, each node's parent, which comes before it; -1 at the root. None for a chain.
        rows: `[B]` int32, the source row each entry reads; 0..B-1 by default.
        track_slots: `[B]` int32, a second slot that receives a state of the same entry.
        track_steps: `[B]` int32, the node whose state goes there; required with track_slots.
        implementation: "xla", "triton", "mosaic_gpu", or None to choose by device.
        interpret: run the named GPU kernel in the interpreter, for tests.
        validate: eager calls only: raise on duplicate slots, on indices out of range other than -1, on late parents.

    Returns:
        (ssm, conv) with the states written.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, with the leaf's path.
        NotImplementedError: a named implementation that the device cannot run.

    Source: `update_mamba_state_after_mtp_verify` of SGLang (pull request 25883), with windows formed at commit.
    """
    ssm_leaves, ssm_tree = pair_leaves(_OP, "ssm", ssm, "ssm_states", ssm_states)
    conv_leaves, conv_tree = pair_leaves(_OP, "conv", conv, "conv_inputs", conv_inputs)
    extent = check_leaves(_OP, "ssm", "ssm_states", ssm_leaves, None)
    extent = check_leaves(_OP, "conv", "conv_inputs", conv_leaves, extent, windows=True)
    for leaf in conv_leaves:
        if not (jnp.issubdtype(leaf.dst.dtype, jnp.integer) or jnp.issubdtype(leaf.dst.dtype, jnp.floating)):
            raise ValueError(
                f"{_OP}: conv{leaf.path} is {leaf.dst.dtype}, expected a floating or integer dtype: the inputs of a "
                "convolution are real numbers"
            )
    if extent is None:
        raise ValueError(f"{_OP}: ssm and conv have no leaves; expected at least one [L, S, ...] array")
    indices = check_indices(_OP, extent, slots, steps, rows, track_slots, track_steps)
    if parents is not None:
        parents = check_parents(_OP, parents, indices.slots.size, extent.steps)
    if validate:
        check_values(_OP, extent, indices, parents, reads_slots=True)
    choice = dispatch.resolve(_OP, implementation, interpret)

    leaves = ssm_leaves + conv_leaves
    results = [leaf.dst for leaf in leaves]
    moving = [i for i, leaf in enumerate(leaves) if leaf.dst.size and leaf.src.size and indices.slots.size]
    if moving:
        ssm_at = [i for i in moving if i < len(ssm_leaves)]
        conv_at = [i for i in moving if i >= len(ssm_leaves)]
        new_ssm, new_conv = _run(
            choice,
            [leaves[i].dst.reshape(extent.layers, extent.slots, -1) for i in ssm_at],
            [leaves[i].dst for i in conv_at],
            [leaves[i].src.reshape(*leaves[i].src.shape[:3], -1) for i in ssm_at],
            [leaves[i].src for i in conv_at],
            parents,
            indices,
            interpret,
        )
        for i, written in zip(moving, new_ssm + new_conv, strict=True):
            results[i] = written.reshape(leaves[i].dst.shape)
    return (
        jax.tree_util.tree_unflatten(ssm_tree, results[: len(ssm_leaves)]),
        jax.tree_util.tree_unflatten(conv_tree, results[len(ssm_leaves) :]),
    )


def _run(
    choice: Choice,
    ssm: list[jax.Array],
    conv: list[jax.Array],
    ssm_states: list[jax.Array],
    conv_inputs: list[jax.Array],
    parents: jax.Array | None,
    indices: Indices,
    interpret: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    arrays = (ssm, conv, ssm_states, conv_inputs, parents, indices)
    match choice.implementation:
        case "triton":
            return triton.commit(*arrays, interpret=interpret)
        case "mosaic_gpu":
            return mosaic_gpu.commit(*arrays, interpret=interpret)
        case "xla":
            return reference.commit(*arrays, row_copies=choice.device.platform == "cpu")
