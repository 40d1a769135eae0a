"""Mamba-2's recurrence along every path of a draft tree: node by node, and in the chunked form.

    h_t = exp(dt_t A) h_parent(t) + dt_t x_t B_t^T,    y_t = h_t C_t + D x_t

and the state before the window stands for the parent of a root. The arithmetic is that of `ssd.py`, whose letters the
shapes use; T are the tree's nodes.
"""

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Ancestors, Array, Float, Parents, SSMStates
from mamba_spec_jax.attention import ssd
from mamba_spec_jax.attention.arithmetic import rounded


def step_tree(
    h0: SSMStates,
    inputs: ssd.SSMInputs,
    A: Float[Array, "H"],
    D: Float[Array, "H"],
    parents: Parents,
    snapshots: Float[Array, "L B T H P N"] | None,
    index: int,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L B T H P N"] | None]:
    """The recurrence node by node, each from its parent's state; with `ssd.step_scan`'s bits where the tree is a chain.

    A node reads its parent's state where it was stored, rounded. Without `snapshots` the states of this layer are kept
    for as long as the layer runs.

    Args:
        h0, inputs, A, D: as `ssd.step_scan`'s.
        parents: `[B, T]`, -1 or an earlier node.
        snapshots: of all layers, or None to keep none.
        index: the layer of `snapshots` that receives the states.
    """
    B, T = parents.shape
    rows = jnp.arange(B)
    layer = index if snapshots is not None else 0
    states = jnp.zeros((1, B, T, *h0.shape[1:]), h0.dtype) if snapshots is None else snapshots

    def step(states, per_node):
        (token, decay, t), parent = per_node
        before = states[layer, rows, jnp.maximum(parent, 0)]
        h = jnp.where((parent < 0)[:, None, None, None], h0, before)
        h_new, y = ssd.advance(h, token, decay, D)
        return states.at[layer, :, t].set(h_new), y

    states, y = jax.lax.scan(step, states, (ssd.scanned_tokens(inputs, A), parents.T))
    return jnp.moveaxis(y, 0, 1), None if snapshots is None else states


def window_tree(
    h0: SSMStates,
    inputs: ssd.SSMInputs,
    A: Float[Array, "H"],
    D: Float[Array, "H"],
    parents: Parents,
    ancestors: Ancestors,
    snapshots: Float[Array, "L B T H P N"] | None,
    index: int,
) -> tuple[Float[Array, "B T H P"], Float[Array, "L B T H P N"] | None]:
    """The recurrence over a whole tree from one read of the state; arguments and results as `step_tree`'s.

    Node t sees the input of its ancestor j decayed by exp(c_t - c_j), where c is dt A summed along the path, and
    nothing of any other node (the state-space dual form of Dao and Gu 2024, under an ancestor mask).
    """
    inputs = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
    h = h0.astype(jnp.float32)
    sums = _path_sums(rounded(inputs.dt * A), parents)
    y = ssd.window_outputs(h, inputs, D, sums, ancestors)
    if snapshots is None:
        return y, None
    states = ssd.window_states(h, inputs, sums, ancestors)
    return y, snapshots.at[index].set(states.astype(snapshots.dtype))


def _path_sums(a: Float[Array, "B T H"], parents: Parents) -> ssd.Sums:
    """`a` summed from the root to each node, and what rounding took from the sums, in log2(T) rounds."""

    def at(leaf, nodes):
        return jnp.take_along_axis(leaf, jnp.maximum(nodes, 0)[..., None], axis=1)

    sums, jump = (a, jnp.zeros_like(a)), parents
    # After each round a node holds the sum of twice as many nodes of its path, and its next jump goes twice as far.
    for _ in range((parents.shape[1] - 1).bit_length()):
        above = (jump >= 0)[..., None]
        further = ssd.add_sums((at(sums[0], jump), at(sums[1], jump)), sums)
        sums = jnp.where(above, further[0], sums[0]), jnp.where(above, further[1], sums[1])
        jump = jnp.where(jump >= 0, jnp.take_along_axis(jump, jnp.maximum(jump, 0), axis=1), -1)
    return sums
