"""Drafts judged in hindsight: proposed while plain steps run, and compared with what these decoded, never verified."""

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Int32, Parents, Rows, Tokens
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.state import DecodeState, Weights
from mamba_spec_jax.speculative.tree_acceptance import walk_tree


@flax.struct.dataclass
class Probe:
    """A proposal that is not verified.

    Attributes:
        tokens: `[B, K]`.
        parents: `[B, K + 1]` of the tree, None for a chain.
        counts: `[B]` how many tokens are real; -1 for rows that were not active.
        starts: `[B]` tokens of each row's text when it was made.
    """

    tokens: Tokens
    parents: Parents | None
    counts: Rows
    starts: Rows


def probe(decoder: Decoder, weights: Weights, state: DecodeState) -> Probe:
    """What the drafter proposes now; its state is left as it was."""
    proposal = decoder.propose(weights, state)
    counts = jnp.where(state.active, proposal.counts, -1)
    return Probe(proposal.tokens, proposal.parents, counts, state.lengths)


def judge(probes: Probe, state: DecodeState) -> Int32[Array, "J B"]:
    """How many drafts of each of J stacked probes came true in the text of `state`; -1 for count -1.

    Of a tree, as many as its deepest path that came true is long.
    """
    return jax.vmap(_judge_one, in_axes=(0, None))(probes, state)


def _judge_one(probe: Probe, state: DecodeState) -> Rows:
    decoded = state.lengths - probe.starts
    if probe.parents is not None:
        tree = Tree.create(probe.parents)
        targets = text_at(state, probe.starts[:, None] + tree.depths)
        tokens = jnp.pad(probe.tokens, ((0, 0), (1, 0)))
        draft = Draft(tokens, probe.counts, state.requests.slots, parents=probe.parents)
        node, _ = walk_tree(draft, targets, tree)
        reached = jnp.take_along_axis(tree.depths, node[:, None], axis=1)[:, 0]
        return jnp.where(probe.counts < 0, -1, jnp.minimum(reached, decoded))
    columns = jnp.arange(probe.tokens.shape[1], dtype=jnp.int32)[None]
    following = text_at(state, probe.starts[:, None] + columns)
    real = columns < jnp.minimum(probe.counts, decoded)[:, None]
    right = jnp.cumprod(real & (probe.tokens == following), axis=1, dtype=jnp.int32)
    return jnp.where(probe.counts < 0, -1, jnp.sum(right, axis=1, dtype=jnp.int32))


def text_at(state: DecodeState, positions: Tokens) -> Tokens:
    """The tokens of each row's text at `positions [B, N]`; the last column's for positions past it."""
    return jnp.take_along_axis(state.tokens, jnp.minimum(positions, state.tokens.shape[1] - 1), axis=1)
