"""What a drafter says, before the target reads it: types and shapes are checked, and values made valid."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Rows, Tokens, require_array
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import Tree, check_parents
from mamba_spec_jax.speculative.protocol import Drafter, Progress, Proposal, SpeculativeModel
from mamba_spec_jax.speculative.sampling import TokenChoice

_NEEDED = ("max_drafts", "hidden_layers", "proposes_trees", "init", "propose", "update")


def require_drafter(drafter: Any) -> None:
    """Raises ValueError unless this has all that `Drafter` asks for."""
    missing = [name for name in _NEEDED if not hasattr(drafter, name)]
    if missing:
        raise ValueError(
            f"got a drafter of type {type(drafter).__name__} without {', '.join(missing)}, expected all that "
            "speculative.protocol.Drafter lists"
        )


def require_fitting(drafter: Drafter, model: SpeculativeModel) -> None:
    """Raises ValueError (while tracing) for what is no drafter, or one that does not fit the target.

    The target has to return the hidden states that the drafter reads, and the drafter has to know all tokens of the
    target. Its own vocabulary may be larger, as that of a model with a padded embedding is.
    """
    require_drafter(drafter)
    if drafter.hidden_layers and drafter.hidden_layers != model.hidden_layers:
        raise ValueError(
            f"{type(drafter).__name__} reads the target's hidden states of layers {drafter.hidden_layers}, but the "
            f"target returns those of {model.hidden_layers}: build it with hidden_layers={drafter.hidden_layers}"
        )
    vocab_size = getattr(drafter, "vocab_size", None)
    if vocab_size is not None and vocab_size < model.vocab_size:
        raise ValueError(
            f"{type(drafter).__name__} has a vocabulary of {vocab_size} tokens, but the target one of "
            f"{model.vocab_size}: draft with a model of the same tokenizer, which knows them all"
        )


def propose(
    drafter: Drafter, params: Any, state: Any, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
) -> Proposal:
    """What the drafter says next, its types and shapes checked; nothing for `num_drafts = 0`.

    Arguments as `Drafter.propose`'s.

    Raises:
        ValueError: while tracing, naming the drafter, what came and what was expected.
    """
    B, caller = lengths.shape[0], f"{type(drafter).__name__}.propose"
    if not 0 <= num_drafts <= drafter.max_drafts:
        raise ValueError(
            f"{type(drafter).__name__} was asked for num_drafts={num_drafts}, expected 0..{drafter.max_drafts} "
            "(its max_drafts)"
        )
    if num_drafts == 0:
        return Proposal(jnp.zeros((B, 0), jnp.int32), jnp.zeros((B,), jnp.int32), state)
    proposal = drafter.propose(params, state, tokens, lengths, choose, num_drafts)
    if not isinstance(proposal, Proposal):
        raise ValueError(f"{caller} returned a {type(proposal).__name__}, expected a Proposal")
    require_array(f"{caller} returned tokens", proposal.tokens, (B, num_drafts))
    require_array(f"{caller} returned counts", proposal.counts, (B,))
    if proposal.probs is not None:
        vocab = "V" if choose.vocab_size is None else choose.vocab_size
        require_array(f"{caller} returned probs", proposal.probs, (B, num_drafts, vocab), "float32")
    if (proposal.parents is not None) is not drafter.proposes_trees:
        raise ValueError(
            f"{caller} returned {'no ' if proposal.parents is None else ''}parents, but its "
            f"proposes_trees is {drafter.proposes_trees}: a tree needs more room in the cache"
        )
    if proposal.parents is not None:
        check_parents(caller, proposal.parents, (B, num_drafts + 1))
    return proposal


def to_draft(
    proposal: Proposal, *, root: Tokens, slots: Rows, depth_limit: Rows, node_limit: Rows, vocab_size: int
) -> Draft:
    """The draft that the target verifies: whatever the proposal holds, only what can be read and accepted.

    Args:
        proposal: from `propose`.
        root: `[B, 1]` each row's last token.
        slots: `[B]` cache slot, -1 for a padding row.
        depth_limit: `[B]` most drafts that may be accepted.
        node_limit: `[B]` most nodes that the cache has room for: node t is written t rows after the root, whatever its
            depth.
        vocab_size: V of the target (static).
    """
    tokens = jnp.concatenate([root, proposal.tokens.astype(jnp.int32)], axis=1)
    counts = jnp.clip(proposal.counts, 0, tokens.shape[1] - 1).astype(jnp.int32)
    draft = Draft(tokens, counts, slots, proposal.probs, proposal.parents).within(vocab_size)
    parents, most = draft.parents, jnp.minimum(depth_limit, node_limit)
    if parents is not None:  # a node too deep to be accepted is cut off
        parents = jnp.where(Tree.create(parents).depths <= depth_limit[:, None], parents, -1)
        most = jnp.where(depth_limit > 0, node_limit, 0)
    counts = jnp.where(slots >= 0, jnp.clip(draft.counts, 0, jnp.maximum(most, 0)), 0)
    return dataclasses.replace(draft, counts=counts, parents=parents)


def update_drafter(drafter: Drafter, params: Any, state: Any, progress: Progress, *, before: Any) -> Any:
    """The drafter's state after it has followed the target.

    Args:
        drafter, params, state, progress: as `Drafter.update`'s.
        before: the state that the loop carries, which the new one has to be like.

    Raises:
        ValueError: while tracing, if the drafter left out a commit, or returned a state unlike the one before.
    """
    updated, caller = drafter.update(params, state, progress), f"{type(drafter).__name__}.update"
    for node in jax.tree.leaves(updated, is_leaf=_is_cache):
        if _is_cache(node):
            node.require_committed(f"the loop, after {caller},")
    expected, came = (str(jax.tree.structure(state)) for state in (before, updated))
    if expected != came:
        raise ValueError(f"{caller} returned {came}, expected a state like the one before, {expected}")
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(updated), strict=True):
        if _kind(old) != _kind(new):
            where = jax.tree_util.keystr(path)
            raise ValueError(f"{caller} returned state{where} {_kind(new)}, expected {_kind(old)} as before")
    return updated


def _kind(leaf: Any) -> str:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def _is_cache(node: Any) -> bool:
    return isinstance(node, HybridCache)
