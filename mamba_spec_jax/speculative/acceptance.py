"""Which drafts survive the target's verdict, and the token that follows them. For trees see `tree_acceptance`."""

import dataclasses
import functools

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import (
    Array,
    Bool,
    Float,
    Logits,
    RowFlags,
    Rows,
    Seeds,
    Tokens,
    require_array,
)
from mamba_spec_jax.cache.records import Draft, require_draft
from mamba_spec_jax.cache.tree import Tree
from mamba_spec_jax.speculative.rejection import drawn_from, residual
from mamba_spec_jax.speculative.sampling import (
    Filters,
    Greedy,
    Method,
    Purpose,
    Sampling,
    draw_keys,
    draw_tokens,
    draw_uniforms,
    filtered_log_probs,
    mask_logits,
)
from mamba_spec_jax.speculative.tree_acceptance import reject_tree, walk_tree
from pallas_kernels.arithmetic import log_softmax


@flax.struct.dataclass
class AcceptResult:
    """What a verify pass emits.

    Attributes:
        tokens: `[B, T]`; the first `accept_lens[b]` are emitted: the accepted drafts, then one token of the target's
            own. Later columns are -1.
        accept_lens: `[B]` emitted tokens, the target's own one included: 1..T, and 0 for padding rows. One fewer in
            rows that failed.
        last_correct_step_indices: `[B]` node whose state the commit keeps, `accept_lens - 1` on a chain; -1 for none.
        path: `[B, T]` node at which each emitted token was chosen, from the root on, -1 in later columns; None for a
            chain, where it is the column itself.
        logprobs: `[B, T]` float32 log-probability of each emitted token under the target's own distribution
            (temperature 1, no filters, nothing forbidden), 0 in later columns; None unless asked for.
        failed: `[B]` rows with no token of the target's own: where their drafts end, its logits hold a NaN or +inf, or
            are -inf for every token allowed. None for no such rows.
    """

    tokens: Tokens
    accept_lens: Rows
    last_correct_step_indices: Rows
    path: Tokens | None = None
    logprobs: Float[Array, "B T"] | None = None
    failed: RowFlags | None = None


def accept(
    method: Method,
    logits: Logits,
    draft: Draft,
    *,
    tree: Tree | None = None,
    seeds: Seeds | None = None,
    positions: Tokens | None = None,
    temperature: Float[Array, "B"] | None = None,
    filters: Filters | None = None,
    forbidden: Bool[Array, "B T V"] | None = None,
    with_logprobs: bool = False,
) -> AcceptResult:
    """Accepts as many of each row's drafts as the method allows, and adds one token of the target's own.

    `Greedy` accepts a draft that is the argmax. `Sampling` is speculative sampling (Leviathan et al. 2023, algorithm 1;
    Chen et al. 2023, algorithm 2) and emits tokens that have exactly the target's filtered distribution p:

    - With `draft.probs` (q), draft d is accepted with probability min(1, p(d) / q(d)); the first rejected one is
      replaced by a draw from the residual max(p - q, 0), and when all are accepted one more token is drawn from p.
    - Without, drafts are point masses. Then p(d) is the chance of acceptance, and the residual is p without d. One draw
      x from p says both: x equals d with probability p(d), and given that it does not, x has the residual's
      distribution. So the token is drawn from p with the noise of (seed, position) as if there were no draft, and the
      draft is accepted if it is that token. The output is, token for token, that of sampling without speculation.

    A chain is accepted up to its first rejected draft, a tree along one path from the root:

    - With `draft.probs`, siblings are tested one after the other; see `tree_acceptance.reject_tree`. They are taken as
      drawn from one q, that of their parent, without replacement and in the order of their nodes. Which nodes there are
      may depend on tokens drawn earlier on their path, not on their own or their siblings' tokens.
    - Without, the token after a node is drawn as if there were no drafts, and the walk goes on at the child that
      carries it. That is recursive rejection over point masses: sibling d is accepted with probability p(d) of what is
      left of p, which is then p without d, and so on; hence a child is accepted with its probability p(d), and given
      that none is, the token has the distribution of p without all of them. One draw from p says the same.

    Of siblings with one token, the first counts.

    Edges: the uniform draw is in [0, 1) and the test is `u q(d) < p(d)`, so p(d) = 0 is always rejected and
    p(d) >= q(d) always accepted. A residual that rounds to zero everywhere falls back to p. Rows at temperature 0 take
    the argmax walk under either rule: p is then one at the argmax.

    Whatever a draft holds, the tokens are the target's. A draft outside the vocabulary counts as not proposed, with all
    that follow it (see `Draft.within`), and so does one that cannot have been drawn from its q: where q has a value
    that is not finite or below zero, sums to something else than 1 (within 1 %), or is zero at the draft. Where drafts
    end for these reasons, the token is that of sampling without drafts.

    Args:
        method: how tokens are chosen (static).
        logits: `[B, T, V]` of the verify pass; node t scores the token after node t. Nodes without a finite maximum
            choose nothing: see `AcceptResult.failed`.
        draft: what was verified; drafts at or past a row's length are never accepted.
        tree: of a draft with parents, from the record of the verify pass; computed if left out.
        seeds: `[B]` request seeds; `Sampling` only.
        positions: `[B, T]` absolute position of the token emitted at each node, which grows with the node's depth;
            `Sampling` only.
        temperature: `[B]`, 0 for greedy rows; `Sampling` only.
        filters: of each row, None for none at all; `Sampling` only.
        forbidden: `[B, T, V]` tokens that must not be emitted at a node.
        with_logprobs: whether to return log-probabilities (static).

    Raises:
        ValueError: while tracing, for shapes that disagree, a missing argument of `Sampling`, or parents that are
            known and no tree.
    """
    if not isinstance(method, Greedy | Sampling):
        raise ValueError(f"accept got method {method!r}, expected Greedy() or Sampling()")
    _check_shapes(logits, draft, seeds, positions, temperature, filters, forbidden)
    draft = draft.within(logits.shape[-1])
    if draft.parents is None:
        tree, walk, reject = None, _walk, _reject
    else:
        tree = Tree.create(draft.parents) if tree is None else tree
        walk, reject = functools.partial(walk_tree, tree=tree), reject_tree
    allowed = mask_logits(logits, forbidden)
    # Asked apart: XLA's maximum on a CPU may lose a NaN, depending on what it is fused with.
    chooses = jnp.isfinite(jnp.max(allowed, axis=-1)) & ~jnp.any(jnp.isnan(allowed), axis=-1)
    if isinstance(method, Greedy):
        best = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
        node, last = walk(draft, jnp.where(chooses, best, -1))
    elif seeds is None or positions is None or temperature is None:
        raise ValueError(f"accept with {method} needs seeds, positions and temperature: draws are seeded per request")
    else:
        log_p = filtered_log_probs(logits, temperature, filters, forbidden)
        log_p = jnp.where(chooses[..., None], log_p, -jnp.inf)
        if draft.probs is None:
            drawn = draw_tokens(draw_keys(seeds, positions, Purpose.TOKEN), log_p)
            node, last = walk(draft, jnp.where(chooses, drawn, -1))
        else:
            node, last = reject(draft, log_p, seeds, positions)
    failed = (draft.slots >= 0) & ~jnp.take_along_axis(chooses, node[:, None], axis=1)[:, 0]
    result = _emit_chain(draft, node, last, failed) if tree is None else _emit_path(draft, tree, node, last, failed)
    return dataclasses.replace(result, logprobs=_own_log_probs(logits, result)) if with_logprobs else result


def _emit_chain(draft: Draft, accepted: Rows, last: Rows, failed: RowFlags) -> AcceptResult:
    accept_lens = jnp.where(draft.slots >= 0, accepted + 1 - failed.astype(jnp.int32), 0)
    nodes = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    following = jnp.concatenate([draft.tokens[:, 1:], last[:, None]], axis=1)
    tokens = jnp.where(nodes == accepted[:, None], last[:, None], following)
    emitted = nodes < accept_lens[:, None]
    return AcceptResult(jnp.where(emitted, tokens, -1), accept_lens, accept_lens - 1, failed=failed)


def _emit_path(draft: Draft, tree: Tree, node: Rows, last: Rows, failed: RowFlags) -> AcceptResult:
    above = jnp.take_along_axis(tree.parents, node[:, None], axis=1)[:, 0]
    path = tree.path_to(jnp.where(draft.slots >= 0, node, -1))
    accepted = jnp.take_along_axis(draft.tokens, jnp.maximum(path[:, 1:], 0), axis=1)
    following = jnp.concatenate([accepted, last[:, None]], axis=1)
    columns = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    reached = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    tokens = jnp.where(columns == reached[:, None] - 1, last[:, None], following)
    accept_lens = jnp.where(draft.slots >= 0, reached - failed.astype(jnp.int32), 0)
    emitted = columns < accept_lens[:, None]
    return AcceptResult(
        tokens=jnp.where(emitted, tokens, -1),
        accept_lens=accept_lens,
        last_correct_step_indices=jnp.where(draft.slots >= 0, jnp.where(failed, above, node), -1),
        path=jnp.where(emitted, path, -1),
        failed=failed,
    )


def _walk(draft: Draft, targets: Tokens) -> tuple[Rows, Rows]:
    """Accepts drafts while they are the target's own tokens; the next of those is the last one emitted."""
    real = _proposed(draft)
    accepted = _leading(real & (draft.tokens[:, 1:] == targets[:, :-1]))
    return accepted, jnp.take_along_axis(targets, accepted[:, None], axis=1)[:, 0]


def _reject(draft: Draft, log_p: Logits, seeds: Seeds, positions: Tokens) -> tuple[Rows, Rows]:
    """Rejection sampling of drafts drawn from `q`; one token is drawn per row, at the node where its drafts end."""
    q = drawn_from(draft.probs)  # type: ignore[arg-type]  # the caller has looked
    drafts = draft.tokens[:, 1:, None]
    p_draft = jnp.exp(jnp.take_along_axis(log_p[:, :-1], drafts, axis=2)[..., 0])
    q_draft = jnp.take_along_axis(q, drafts, axis=2)[..., 0]
    real = jnp.cumprod(_proposed(draft) & (q_draft > 0), axis=1, dtype=jnp.int32).astype(bool)
    uniforms = draw_uniforms(draw_keys(seeds, positions[:, :-1], Purpose.ACCEPT))
    accepted = _leading(real & (uniforms * q_draft < p_draft))

    node = accepted[:, None]
    log_p_last = jnp.take_along_axis(log_p, node[..., None], axis=1)[:, 0]
    q_last = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), node[..., None], axis=1)[:, 0]
    rejected = node < jnp.sum(real, axis=1, keepdims=True, dtype=jnp.int32)
    weights = jnp.where(rejected, jnp.log(residual(jnp.exp(log_p_last), q_last)), log_p_last)
    keys = draw_keys(seeds, jnp.take_along_axis(positions, node, axis=1)[:, 0], Purpose.TOKEN)
    return accepted, draw_tokens(keys, weights)


def _proposed(draft: Draft) -> Bool[Array, "B K"]:
    return jnp.arange(draft.tokens.shape[1] - 1, dtype=jnp.int32)[None] < draft.counts[:, None]


def _leading(flags: Bool[Array, "B K"]) -> Rows:
    """How many flags are set before the first that is not."""
    return jnp.sum(jnp.cumprod(flags, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _own_log_probs(logits: Logits, result: AcceptResult) -> Float[Array, "B T"]:
    log_probs = log_softmax(logits.astype(jnp.float32))
    emitted = result.tokens >= 0
    tokens = jnp.where(emitted, result.tokens, 0)
    if result.path is None:
        chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    else:
        chosen = log_probs[jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None], jnp.maximum(result.path, 0), tokens]
    return jnp.where(emitted, chosen, 0.0)


def _check_shapes(logits, draft, seeds, positions, temperature, filters, forbidden) -> None:
    require_array("accept got logits", logits, ("B", "T", "V"), "float32")
    batch, nodes, vocab = logits.shape
    require_draft("accept", draft)
    require_array("accept got draft.tokens", draft.tokens, (batch, nodes))
    optional = {
        "draft.probs": (draft.probs, (batch, nodes - 1, vocab), "float32"),
        "seeds": (seeds, (batch,), "int32"),
        "positions": (positions, (batch, nodes), "int32"),
        "temperature": (temperature, (batch,), "float32"),
        "forbidden": (forbidden, (batch, nodes, vocab), "bool"),
        **{
            f"filters.{name}": (rows, (batch,), "int32" if name == "top_k" else "float32")
            for name, rows in ({} if filters is None else vars(filters)).items()
        },
    }
    for name, (value, shape, kind) in optional.items():
        if value is not None:
            require_array(f"accept got {name}", value, shape, kind)
