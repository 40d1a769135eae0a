"""Which drafts survive the target's verdict, and the token that follows them. For trees see `tree_acceptance`."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Bool, Float, Logits, Rows, Seeds, Tokens
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import check_parents, path_to
from mamba_spec_jax.speculative.rejection import residual
from mamba_spec_jax.speculative.sampling import (
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


@flax.struct.dataclass
class AcceptResult:
    """What a verify pass emits.

    Attributes:
        tokens: `[B, T]`; the first `accept_lens[b]` are emitted: the accepted drafts, then one token of the target's
            own. Later columns are -1.
        accept_lens: `[B]` emitted tokens, the target's own one included: 1..T, and 0 for padding rows.
        last_correct_step_indices: `[B]` node whose state the commit keeps, `accept_lens - 1` on a chain; -1 for none.
        path: `[B, T]` node at which each emitted token was chosen, from the root on, -1 in later columns; None for a
            chain, where it is the column itself.
        logprobs: `[B, T]` float32 log-probability of each emitted token under the target's own distribution
            (temperature 1, no filters, nothing forbidden), 0 in later columns; None unless asked for.
    """

    tokens: Tokens
    accept_lens: Rows
    last_correct_step_indices: Rows
    path: Tokens | None = None
    logprobs: Float[Array, "B T"] | None = None


def accept(
    method: Method,
    logits: Logits,
    draft: Draft,
    *,
    seeds: Seeds | None = None,
    positions: Tokens | None = None,
    temperature: Float[Array, "B"] | None = None,
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

    Edges: the uniform draw is in [0, 1) and the test is `u q(d) < p(d)`, so p(d) = 0 is always rejected, p(d) >= q(d)
    always accepted, and q(d) = 0 < p(d) accepted. A residual that rounds to zero everywhere falls back to p. A draft
    outside the vocabulary is not accepted, nor is any that follows it. Rows at temperature 0 take the argmax walk under
    either rule: p is then one at the argmax.

    Args:
        method: how tokens are chosen (static).
        logits: `[B, T, V]` of the verify pass; node t scores the token after node t. At least one is finite at every
            real node: NaN is not looked for, and a row of it chooses token 0.
        draft: what was verified; drafts at or past a row's length are never accepted.
        seeds: `[B]` request seeds; `Sampling` only.
        positions: `[B, T]` absolute position of the token emitted at each node, which grows with the node's depth;
            `Sampling` only.
        temperature: `[B]`, 0 for greedy rows; `Sampling` only.
        forbidden: `[B, T, V]` tokens that must not be emitted at a node.
        with_logprobs: whether to return log-probabilities (static).

    Raises:
        ValueError: while tracing, for shapes that disagree, a missing argument of `Sampling`, or parents that are
            known and no tree.
    """
    if not isinstance(method, Greedy | Sampling):
        raise ValueError(f"accept got method {method!r}, expected Greedy() or Sampling(...)")
    _check_shapes(logits, draft, seeds, positions, temperature, forbidden)
    walk, reject = (_walk, _reject) if draft.parents is None else (walk_tree, reject_tree)
    if isinstance(method, Greedy):
        best = jnp.argmax(mask_logits(logits, forbidden), axis=-1).astype(jnp.int32)
        node, last = walk(draft, best, logits.shape[-1])
    elif seeds is None or positions is None or temperature is None:
        raise ValueError(f"accept with {method} needs seeds, positions and temperature: draws are seeded per request")
    else:
        log_p = filtered_log_probs(method, logits, temperature, forbidden)
        if draft.probs is None:
            drawn = draw_tokens(draw_keys(seeds, positions, Purpose.TOKEN), log_p)
            node, last = walk(draft, drawn, logits.shape[-1])
        else:
            node, last = reject(draft, log_p, seeds, positions)
    result = _emit_chain(draft, node, last) if draft.parents is None else _emit_path(draft, node, last)
    return dataclasses.replace(result, logprobs=_own_log_probs(logits, result)) if with_logprobs else result


def _emit_chain(draft: Draft, accepted: Rows, last: Rows) -> AcceptResult:
    accept_lens = jnp.where(draft.slots >= 0, accepted + 1, 0)
    nodes = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    following = jnp.concatenate([draft.tokens[:, 1:], last[:, None]], axis=1)
    tokens = jnp.where(nodes == accepted[:, None], last[:, None], following)
    emitted = nodes < accept_lens[:, None]
    return AcceptResult(jnp.where(emitted, tokens, -1), accept_lens, accept_lens - 1)


def _emit_path(draft: Draft, node: Rows, last: Rows) -> AcceptResult:
    node = jnp.where(draft.slots >= 0, node, -1)
    path = path_to(draft.parents, node, draft.tokens.shape[1])  # type: ignore[arg-type]  # a tree has parents
    accept_lens = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    accepted = jnp.take_along_axis(draft.tokens, jnp.maximum(path[:, 1:], 0), axis=1)
    following = jnp.concatenate([accepted, last[:, None]], axis=1)
    columns = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    tokens = jnp.where(columns == accept_lens[:, None] - 1, last[:, None], following)
    return AcceptResult(jnp.where(path >= 0, tokens, -1), accept_lens, node, path)


def _walk(draft: Draft, targets: Tokens, vocab: int) -> tuple[Rows, Rows]:
    """Accepts drafts while they are the target's own tokens; the next of those is the last one emitted."""
    real = _real_drafts(draft, vocab)
    accepted = _leading(real & (draft.tokens[:, 1:] == targets[:, :-1]))
    return accepted, jnp.take_along_axis(targets, accepted[:, None], axis=1)[:, 0]


def _reject(draft: Draft, log_p: Logits, seeds: Seeds, positions: Tokens) -> tuple[Rows, Rows]:
    """Rejection sampling of drafts drawn from `q`; one token is drawn per row, at the node where its drafts end."""
    real = _real_drafts(draft, log_p.shape[-1])
    q = draft.probs.astype(jnp.float32)  # type: ignore[union-attr]  # the caller has looked
    drafts = jnp.where(real, draft.tokens[:, 1:], 0)[..., None]
    p_draft = jnp.exp(jnp.take_along_axis(log_p[:, :-1], drafts, axis=2)[..., 0])
    q_draft = jnp.take_along_axis(q, drafts, axis=2)[..., 0]
    uniforms = draw_uniforms(draw_keys(seeds, positions[:, :-1], Purpose.ACCEPT))
    accepted = _leading(real & (uniforms * q_draft < p_draft))

    node = accepted[:, None]
    log_p_last = jnp.take_along_axis(log_p, node[..., None], axis=1)[:, 0]
    q_last = jnp.take_along_axis(jnp.pad(q, ((0, 0), (0, 1), (0, 0))), node[..., None], axis=1)[:, 0]
    rejected = node < jnp.sum(real, axis=1, keepdims=True, dtype=jnp.int32)
    weights = jnp.where(rejected, jnp.log(residual(jnp.exp(log_p_last), q_last)), log_p_last)
    keys = draw_keys(seeds, jnp.take_along_axis(positions, node, axis=1)[:, 0], Purpose.TOKEN)
    return accepted, draw_tokens(keys, weights)


def _real_drafts(draft: Draft, vocab: int) -> Bool[Array, "B K"]:
    """The drafts of each row, up to the first one outside the vocabulary."""
    drafts = draft.tokens[:, 1:]
    proposed = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < draft.lengths[:, None]
    return jnp.cumprod(proposed & (drafts >= 0) & (drafts < vocab), axis=1, dtype=jnp.int32).astype(bool)


def _leading(flags: Bool[Array, "B K"]) -> Rows:
    """How many flags are set before the first that is not."""
    return jnp.sum(jnp.cumprod(flags, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def _own_log_probs(logits: Logits, result: AcceptResult) -> Float[Array, "B T"]:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    emitted = result.tokens >= 0
    tokens = jnp.where(emitted, result.tokens, 0)
    if result.path is None:
        chosen = jnp.take_along_axis(log_probs, tokens[..., None], axis=2)[..., 0]
    else:
        chosen = log_probs[jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None], jnp.maximum(result.path, 0), tokens]
    return jnp.where(emitted, chosen, 0.0)


def _check_shapes(logits, draft, seeds, positions, temperature, forbidden) -> None:
    if logits.ndim != 3:
        raise ValueError(f"accept got logits of shape {logits.shape}, expected [B, T, V]")
    batch, nodes, vocab = logits.shape
    expected = {
        "draft.tokens": (draft.tokens, (batch, nodes)),
        "draft.lengths": (draft.lengths, (batch,)),
        "draft.slots": (draft.slots, (batch,)),
        "draft.probs": (draft.probs, (batch, nodes - 1, vocab)),
        "seeds": (seeds, (batch,)),
        "positions": (positions, (batch, nodes)),
        "temperature": (temperature, (batch,)),
        "forbidden": (forbidden, (batch, nodes, vocab)),
    }
    for name, (value, shape) in expected.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"accept got {name} of shape {value.shape}, expected {shape} to go with the logits")
    if draft.parents is not None:
        check_parents("accept", draft.parents, (batch, nodes))
