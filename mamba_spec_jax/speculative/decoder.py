"""Speculative decoding as one object: draft, verify in one pass, accept, commit; a step of it, and loops of steps."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, RowFlags, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft, ModelOutput
from mamba_spec_jax.modes import ForwardMode
from mamba_spec_jax.speculative.acceptance import AcceptResult, accept
from mamba_spec_jax.speculative.drafts import propose, require_fitting, to_draft, update_drafter
from mamba_spec_jax.speculative.prompts import check_prompts, next_power_of_two, pieces
from mamba_spec_jax.speculative.protocol import Drafter, Progress, Proposal, SpeculativeModel
from mamba_spec_jax.speculative.requests import Requests, RowOptions, named_options
from mamba_spec_jax.speculative.sampling import Greedy, Method, TokenChoice
from mamba_spec_jax.speculative.state import DecodeState, Statistics, Weights
from mamba_spec_jax.speculative.stop import StopConditions, StopReason, limit_accept
from pallas_kernels import loops


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Decoder:
    """All of speculative decoding that is static; weights and state are arguments of its methods.

    Hashable, and a pytree without leaves, so that it may be closed over, or passed to a function under `jax.jit`:
    `step = jax.jit(decoder.step, donate_argnames="state")`, then `state = step(weights, state)`.

    Attributes:
        model: the target.
        drafter: proposes.
        method: how tokens are chosen.
        num_drafts: K, drafts of a step; a verify pass has T = K + 1 columns and emits at most T tokens a row. The
            drafter is not asked for 0. By default its `max_drafts`.

    Raises:
        ValueError: what came is no drafter, one that does not fit the target, no method, or no number of drafts that
            the drafter can propose.
    """

    model: SpeculativeModel
    drafter: Drafter
    method: Method = Greedy()  # noqa: RUF009, frozen
    num_drafts: int = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self):
        require_fitting(self.drafter, self.model)
        if not isinstance(self.method, Method):
            raise ValueError(f"method is {self.method!r}, expected Greedy() or Sampling()")
        K, most = self.num_drafts, self.drafter.max_drafts
        if K is None:
            object.__setattr__(self, "num_drafts", most)
        elif isinstance(K, bool) or not isinstance(K, numbers.Integral) or not 0 <= K <= most:
            raise ValueError(f"num_drafts is {K!r}, expected 0..{most}, what {type(self.drafter).__name__} can propose")

    @named_options(Requests.create)
    def init(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int]],
        *,
        stops: StopConditions | None = None,
        logprobs: bool = False,
        progress: bool | None = False,
        **options: Unpack[RowOptions],
    ) -> DecodeState:
        """Checks the prompts, makes a cache that holds prompt and output, and prefills all but each row's last token.

        For a drafter that proposes trees the cache has room for one more of them, which is written node by node.

        Args:
            weights: of target and drafter.
            prompts: token ids of each row, at least one each.
            stops: what ends a row, besides its budget; nothing by default. Copied, as steps consume the state.
            logprobs: whether to keep each emitted token's log-probability.
            progress: show a bar on stderr; None shows it if that is a terminal.
            **options: see `RowOptions`.

        Raises:
            ValueError: for prompts, lengths or options that do not fit, for an option of the draws where no row draws,
                and for a temperature under `Greedy`.
        """
        lengths, B = check_prompts(prompts, self.model.vocab_size), len(prompts)
        requests = Requests.create(B, self.num_drafts, **options)
        if isinstance(self.method, Greedy) and np.any(np.asarray(requests.temperature) > 0):
            raise ValueError(
                f"temperature is {options['temperature']}, but the decoder's method is Greedy(), which draws nothing: "
                "make the decoder with Sampling(), or leave temperature out"
            )
        longest = int(np.max(lengths.astype(np.int64) + requests.max_new))
        max_len = next_power_of_two(longest + (self.num_drafts if self.drafter.proposes_trees else 0))
        tokens = np.zeros((B, max_len), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        reasons = np.where(np.asarray(requests.max_new) > 0, StopReason.NONE, StopReason.MAX_NEW).astype(np.int32)
        requests = jax.tree.map(jnp.asarray, requests)
        caches = self.model.init_cache(B, max_len), self.drafter.init(B, max_len)
        # One program for all: how tokens are chosen or drafted does not matter to prompts.
        reader = dataclasses.replace(self, method=Greedy(), num_drafts=0)
        for window, num_tokens, bar in pieces(tokens, lengths - 1, progress):
            caches = _prefill(reader, weights, caches, jnp.asarray(window), requests.slots, jnp.asarray(num_tokens))
            if bar.shown:  # pieces are enqueued faster than they are read
                jax.block_until_ready(caches)
        cache, drafter_state = caches
        return DecodeState(
            cache=cache,
            drafter=drafter_state,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            prompt_lengths=jnp.asarray(lengths),
            reasons=jnp.asarray(reasons),
            stop_states=jnp.zeros((B,), jnp.int32),
            requests=requests,
            stops=StopConditions.create() if stops is None else jax.tree.map(jnp.copy, stops),
            statistics=Statistics.create(B, self.num_drafts),
            logprobs=jnp.zeros((B, max_len), jnp.float32) if logprobs else None,
        )

    def prefill(
        self, weights: Weights, caches: tuple[HybridCache, Any], window: Tokens, slots: Rows, num_tokens: Rows
    ) -> tuple[HybridCache, Any]:
        """Reads a piece of prompt: the target, and the drafter after it.

        Args:
            weights: of both.
            caches: the target's cache and the drafter's state; consumed.
            window: `[B, T + 1]` T tokens to read, and the token after each: in the next column.
            slots: `[B]` cache slot of each row, -1 for padding.
            num_tokens: `[B]` real tokens of each row, 0..T.
        """
        cache, drafter_state = caches
        tokens, following = window[:, :-1], window[:, 1:]
        output = self.model.prefill(weights.target, tokens, cache, slots=slots, num_tokens=num_tokens)
        progress = Progress(tokens, following, output.hidden, num_tokens, ForwardMode.EXTEND)
        return output.cache, update_drafter(
            self.drafter, weights.drafter, drafter_state, progress, before=drafter_state
        )

    def propose(self, weights: Weights, state: DecodeState) -> Proposal:
        """What the drafter proposes after each row's last token; types and shapes are checked."""
        requests = state.requests
        choose = TokenChoice(requests.seeds, requests.temperature, self.method, self.model.vocab_size, requests.filters)
        return propose(
            self.drafter, weights.drafter, state.drafter, state.tokens, state.lengths, choose, self.num_drafts
        )

    def step(self, weights: Weights, state: DecodeState) -> DecodeState:
        """Drafts up to `num_drafts` tokens a row, verifies them in one pass, and commits exactly what was accepted.

        Pure, for your own `jax.jit`. Nothing is emitted or committed past a stop; finished rows change nothing.
        Whatever the drafter proposes, the tokens are the target's: see `accept`.

        Args:
            weights: of target and drafter.
            state: from `init`, or from the step before; donate it, and the cache is updated in place.

        Raises:
            ValueError: while tracing, if the model's or the drafter's commit was left out, or what the drafter returns
                is of another type, shape or dtype than `Drafter` asks for.
        """
        model, requests, active = self.model, state.requests, state.active
        most = state.statistics.histogram.shape[1] - 1
        if self.num_drafts > most:
            raise ValueError(
                f"num_drafts is {self.num_drafts}, but the state was made for at most {most}: make it by the init of "
                "a decoder with as many"
            )
        remaining = requests.max_new - state.new_tokens
        to_come = requests.min_new - state.new_tokens
        room = state.room
        proposal = self.propose(weights, state)
        draft = to_draft(
            proposal,
            root=jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1),
            slots=jnp.where(active, requests.slots, -1),
            depth_limit=jnp.minimum(requests.depth_limit, remaining - 1),
            node_limit=room - 1,
            vocab_size=model.vocab_size,
        )

        output = model.verify(weights.target, draft, state.cache)
        if output.record is None or (output.record.tree is None) is not (draft.parents is None):
            what = "no record" if output.record is None else "a record without the draft's tree"
            raise ValueError(f"{type(model).__name__}.verify returned {what}, expected what its commit needs")
        tree = output.record.tree
        depth = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None] if tree is None else tree.depths
        result = accept(
            self.method,
            output.logits,
            draft,
            tree=tree,
            seeds=requests.seeds,
            positions=state.lengths[:, None] + depth,
            temperature=requests.temperature,
            filters=requests.filters,
            forbidden=state.stops.forbidden(model.vocab_size, to_come, depth),
            with_logprobs=state.logprobs is not None,
        )
        outcome = limit_accept(result, state.stops, state.stop_states, remaining, to_come, room)
        result = outcome.result

        cache = model.backend.update_mamba_state_after_mtp_verify(
            output.cache, output.record, result.last_correct_step_indices
        )
        progress = _progress(draft, output, result)
        drafter_state = update_drafter(self.drafter, weights.drafter, proposal.state, progress, before=state.drafter)
        cache.require_committed("Decoder.step")
        return dataclasses.replace(
            state,
            cache=cache,
            drafter=drafter_state,
            tokens=_append(state.tokens, state.lengths, result.tokens, result.accept_lens),
            lengths=state.lengths + result.accept_lens,
            reasons=jnp.where(outcome.finished, outcome.reasons, state.reasons),
            stop_states=outcome.states,
            statistics=_count(state.statistics, draft, result.accept_lens, active),
            logprobs=None
            if state.logprobs is None or result.logprobs is None
            else _append(state.logprobs, state.lengths, result.logprobs, result.accept_lens),
        )

    def steps(self, weights: Weights, state: DecodeState, num_steps: int) -> DecodeState:
        """`num_steps` steps with a known trip count, so that no predicate travels to the host; `state` as in `step`."""
        return loops.fori_loop(0, num_steps, lambda _, carry: self.step(weights, carry), state)

    def until_finished(self, weights: Weights, state: DecodeState, max_steps: int | None = None) -> DecodeState:
        """Steps until every row has finished, or `max_steps` of them, as one `jax.lax.while_loop`.

        To embed in a program; `state` as in `step`. On a GPU the loop's predicate is read on the host after every step;
        `generate` avoids that.
        """

        def goes_on(carry):
            state, steps = carry
            return jnp.any(state.active) & (True if max_steps is None else steps < max_steps)

        def step(carry):
            state, steps = carry
            return self.step(weights, state), steps + 1

        return loops.while_loop(goes_on, step, (state, jnp.int32(0)))[0]


_prefill = jax.jit(Decoder.prefill, donate_argnames="caches")


def _progress(draft: Draft, output: ModelOutput, result: AcceptResult) -> Progress:
    """The accepted path, as a drafter follows it."""
    tokens, hidden = draft.tokens, output.hidden
    if result.path is not None:
        path = jnp.maximum(result.path, 0)
        tokens = jnp.take_along_axis(tokens, path, axis=1)
        hidden = tuple(jnp.take_along_axis(layer, path[..., None], axis=1) for layer in hidden)
    return Progress(tokens, result.tokens, hidden, result.accept_lens, ForwardMode.TARGET_VERIFY)


def _append(buffer: Array, lengths: Rows, window: Array, counts: Rows) -> Array:
    """Appends the first `counts[b]` columns of each row's window to its tokens."""
    columns = jnp.arange(window.shape[1], dtype=jnp.int32)[None]
    index = jnp.where(columns < counts[:, None], lengths[:, None] + columns, buffer.shape[1])
    rows = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
    return buffer.at[rows, index].set(window.astype(buffer.dtype), mode="drop")


def _count(statistics: Statistics, draft: Draft, accept_lens: Rows, active: RowFlags) -> Statistics:
    lengths = jnp.arange(1, statistics.histogram.shape[1] + 1, dtype=jnp.int32)[None]
    drafted = draft.counts
    if draft.parents is not None:
        real = jnp.arange(draft.parents.shape[1], dtype=jnp.int32)[None] <= draft.counts[:, None]
        drafted = jnp.sum(real & (draft.parents >= 0), axis=1, dtype=jnp.int32)
    return Statistics(
        passes=statistics.passes + active.astype(jnp.int32),
        drafted=statistics.drafted + jnp.where(active, drafted, 0),
        histogram=statistics.histogram + (accept_lens[:, None] == lengths).astype(jnp.int32),
    )
