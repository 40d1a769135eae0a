"""Which path of a draft tree survives the target's verdict, and the token that follows it."""

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Bool, Float, Logits, Parents, Rows, Seeds, Tokens
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.speculative.rejection import drawn_from, normalised, residual, without
from mamba_spec_jax.speculative.sampling import Purpose, draw_keys, draw_tokens, draw_uniforms
from pallas_kernels import loops
from pallas_kernels.tree import earlier_parents


def walk_tree(draft: Draft, targets: Tokens, tree: Tree) -> tuple[Rows, Rows]:
    """Goes from the root to the child that carries the target's own token, for as long as there is one.

    Args:
        draft: with `parents`.
        targets: `[B, T]` the token that the target chooses after each node, -1 where it cannot choose one.
        tree: of those parents; further nodes may be detached in the draft.

    Returns:
        `[B]` the last node reached, and the `[B]` target's token after it.
    """
    parents = earlier_parents(draft.parents)  # type: ignore[arg-type]  # the caller has looked
    wanted = jnp.take_along_axis(targets, jnp.maximum(parents, 0), axis=1)
    right = _candidates(draft, parents) & (draft.tokens == wanted)
    right = right.at[:, 0].set(True)
    # A node is reached if its whole path is right. At most one child of a node is, so these nodes are one path.
    reached = ~jnp.any(tree.ancestors & ~right[:, None], axis=-1)
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)
    node = jnp.max(jnp.where(reached, nodes, 0), axis=1)
    return node, jnp.take_along_axis(targets, node[:, None], axis=1)[:, 0]


def reject_tree(draft: Draft, log_p: Logits, seeds: Seeds, positions: Tokens) -> tuple[Rows, Rows]:
    """Recursive rejection over siblings: each child of the node reached is tested in turn, and one may be accepted.

    A child with token d is accepted with probability min(1, p(d) / q(d)). If it is not, p becomes the normalised
    max(p - q, 0), and q what its drafter drew the next sibling from, q without d, normalised; then the next sibling is
    tested against those. The last token is drawn from what is left of p. Whatever siblings there are, the token after a
    node has the distribution p: a round of rejection keeps it for any q (Leviathan et al. 2023, appendix A.1), and what
    is passed on is the distribution which the next round has to make up for (Miao et al. 2024, algorithm 2; without
    replacement, Jeon et al. 2024).

    Args:
        draft: with `parents` and `probs`.
        log_p: `[B, T, V]` of the target after each node.
        seeds: `[B]`.
        positions: `[B, T]` of the token emitted at each node.

    Returns:
        As `walk_tree`.
    """
    parents = earlier_parents(draft.parents)  # type: ignore[arg-type]  # the caller has looked
    probs = drawn_from(draft.probs)  # type: ignore[arg-type]  # the caller has looked
    tokens = draft.tokens
    drawn = jnp.take_along_axis(probs, tokens[:, 1:, None], axis=2)[..., 0] > 0
    candidates = _candidates(draft, parents) & jnp.pad(drawn, ((0, 0), (1, 0)))
    uniforms = _sibling_uniforms(parents, seeds, positions)

    def test(carry, node):
        current, p, q, untested = carry
        token = tokens[:, node]
        tested = candidates[:, node] & (parents[:, node] == current)
        q = _select(tested & untested, probs[:, node - 1], q)
        tested &= _at(q, token) > 0  # or it cannot have been drawn after the siblings before it
        accepted = tested & (uniforms[:, node] * _at(q, token) < _at(p, token))
        rejected = tested & ~accepted
        rest = _select(rejected, normalised(residual(p, q)), p)
        carry = (
            jnp.where(accepted, node, current),
            _select(accepted, jnp.exp(log_p[:, node]), rest),
            _select(rejected, without(q, token), q),
            accepted | (untested & ~rejected),
        )
        return carry, None

    B, T, _ = log_p.shape
    start = jnp.zeros((B,), jnp.int32), jnp.exp(log_p[:, 0]), jnp.zeros_like(probs[:, 0]), jnp.ones((B,), bool)
    (node, p, _, untested), _ = loops.scan(test, start, jnp.arange(1, T, dtype=jnp.int32))

    def at_node(leaf):
        return jnp.take_along_axis(leaf, node.reshape(B, *[1] * (leaf.ndim - 1)), axis=1)[:, 0]

    weights = _select(untested, at_node(log_p), jnp.log(p))
    return node, draw_tokens(draw_keys(seeds, at_node(positions), Purpose.TOKEN), weights)


def _candidates(draft: Draft, parents: Parents) -> Bool[Array, "B T"]:
    """The nodes that may be accepted: drafted, and the first of their siblings with their token."""
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)
    usable = (nodes[None] <= draft.counts[:, None]) & (parents >= 0)
    earlier = (nodes[:, None] > nodes[None])[None]
    siblings = (parents[:, :, None] == parents[:, None]) & earlier  # [B, T, T]
    repeated = siblings & (draft.tokens[:, :, None] == draft.tokens[:, None]) & usable[:, None]
    return usable & ~jnp.any(repeated, axis=-1)


def _sibling_uniforms(parents: Parents, seeds: Seeds, positions: Tokens) -> Float[Array, "B T"]:
    """One draw a node, of (seed, position, how many siblings come before it); an only child's is a chain's."""
    nodes = jnp.arange(parents.shape[1], dtype=jnp.int32)
    siblings = (parents[:, :, None] == parents[:, None]) & (nodes[:, None] > nodes[None])[None]
    rank = jnp.sum(siblings, axis=-1, dtype=jnp.int32)
    at_parent = jnp.take_along_axis(positions, jnp.maximum(parents, 0), axis=1)
    keys = draw_keys(seeds, at_parent, Purpose.ACCEPT)
    later = jax.vmap(jax.random.fold_in)(keys.ravel(), rank.ravel()).reshape(keys.shape)
    return draw_uniforms(jnp.where(rank == 0, keys, later))


def _select(rows: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows[:, None], new, old)


def _at(weights: Float[Array, "B V"], tokens: Rows) -> Float[Array, "B"]:
    return jnp.take_along_axis(weights, tokens[:, None], axis=1)[:, 0]
