"""One step of speculative decoding, and loops of steps: draft, verify in one pass, accept, commit."""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Int32, RowFlags, Rows, Seeds, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft, ModelOutput
from mamba_spec_jax.cache.tree import depths
from mamba_spec_jax.modes import ForwardMode
from mamba_spec_jax.speculative.acceptance import AcceptResult, accept
from mamba_spec_jax.speculative.drafts import propose, require_fitting, to_draft, update_drafter
from mamba_spec_jax.speculative.protocol import Drafter, Progress, SpeculativeModel
from mamba_spec_jax.speculative.sampling import Filters, Method, TokenChoice
from mamba_spec_jax.speculative.stop import StopConditions, StopReason, limit_accept
from pallas_kernels import loops


@flax.struct.dataclass
class Requests:
    """What each row asks for.

    Attributes:
        slots: `[B]` cache slot, -1 for a padding row.
        max_new: `[B]` tokens it may emit.
        min_new: `[B]` tokens before the one that may stop it: see `StopConditions`.
        draft_limit: `[B]` most drafts a step, in a tree the greatest depth; 0 decodes plainly inside the same compiled
            step.
        seeds: `[B]` noise of its draws.
        temperature: `[B]`; 0 is greedy.
        filters: which likely tokens are drawn from.
    """

    slots: Rows
    max_new: Rows
    min_new: Rows
    draft_limit: Rows
    seeds: Seeds
    temperature: Float[Array, "B"]
    filters: Filters


@flax.struct.dataclass
class Statistics:
    """Counts since the start.

    Attributes:
        passes: `[B]` verify passes in which the row was active.
        drafted: `[B]` tokens proposed to them.
        histogram: `[B, T]` passes that emitted 1..T tokens, for the largest T the loop runs.
    """

    passes: Rows
    drafted: Rows
    histogram: Int32[Array, "B T"]

    @property
    def emitted(self) -> Rows:
        """`[B]` tokens emitted."""
        return jnp.sum(
            self.histogram * jnp.arange(1, self.histogram.shape[1] + 1, dtype=jnp.int32)[None], axis=1, dtype=jnp.int32
        )

    @property
    def mean_acceptance_length(self) -> Float[Array, ""]:
        """Tokens emitted per verify pass, bonus token included, over all rows; 0 before the first pass."""
        return jnp.sum(self.emitted) / jnp.maximum(jnp.sum(self.passes), 1)


@flax.struct.dataclass
class DecodeState:
    """All that changes from step to step.

    A row's last token, the root, is always one ahead of its cache: it enters with the next verify pass.

    Attributes:
        cache: the target's.
        drafter: the drafter's own state.
        tokens: `[B, M]` prompt and emitted tokens.
        lengths: `[B]` how many of them are real, at least 1.
        prompt_lengths: `[B]`.
        reasons: `[B]` `StopReason` of finished rows, NONE for the others.
        stop_states: `[B]` how far each row is into a stop string.
        requests: what the rows ask for.
        statistics: counts.
        logprobs: `[B, M]` float32 of the emitted tokens under the target, None unless asked for.
    """

    cache: HybridCache
    drafter: Any
    tokens: Tokens
    lengths: Rows
    prompt_lengths: Rows
    reasons: Rows
    stop_states: Rows
    requests: Requests
    statistics: Statistics
    logprobs: Float[Array, "B M"] | None = None

    @property
    def active(self) -> RowFlags:
        """`[B]` rows that still decode."""
        exists = (self.requests.slots >= 0) & (self.requests.slots < self.cache.slots)
        return (self.reasons == StopReason.NONE.value) & exists

    @property
    def new_tokens(self) -> Rows:
        """`[B]` tokens emitted so far."""
        return self.lengths - self.prompt_lengths

    @property
    def room(self) -> Rows:
        """`[B]` tokens that each row may still emit before its cache slot, or its row of `tokens`, is full."""
        return jnp.minimum(self.cache.room(self.requests.slots), self.tokens.shape[1] - self.lengths)


def speculative_decode_step(
    model: SpeculativeModel,
    params: Any,
    state: DecodeState,
    drafter: Drafter,
    method: Method,
    num_drafts: int,
    stops: StopConditions | None = None,
    drafter_params: Any = None,
) -> DecodeState:
    """Drafts up to `num_drafts` tokens a row, verifies them in one pass, and commits exactly what was accepted.

    Pure, for your own `jax.jit`: make `model`, `drafter`, `method` and `num_drafts` static, and donate `state`.
    Nothing is emitted or committed past a stop; finished rows change nothing. Whatever the drafter proposes, the tokens
    are the target's: see `drafts.to_draft` and `accept`.

    Args:
        model: target.
        params: its weights.
        state: consumed.
        drafter: proposes; `num_drafts = 0` never asks it.
        method: how tokens are chosen.
        num_drafts: K; the verify pass has T = K + 1 columns, and emits K + 1 tokens a row at most.
        stops: what ends a row, besides its budget.
        drafter_params: the drafter's weights, if it has any.

    Raises:
        ValueError: while tracing, if the model's or the drafter's commit was left out, or what the drafter returns is
            of another type, shape or dtype than `Drafter` asks for.
    """
    require_fitting(drafter, model)
    requests = state.requests
    active = state.active
    stops = StopConditions.create() if stops is None else stops
    if num_drafts + 1 > state.statistics.histogram.shape[1]:
        raise ValueError(
            f"num_drafts is {num_drafts}, but the state was made for at most "
            f"{state.statistics.histogram.shape[1] - 1}: pass max_drafts to init_decode"
        )
    remaining = requests.max_new - state.new_tokens
    room = state.room
    choose = TokenChoice(requests.seeds, requests.temperature, method, model.vocab_size, requests.filters)
    proposal = propose(drafter, drafter_params, state.drafter, state.tokens, state.lengths, choose, num_drafts)
    draft = to_draft(
        proposal,
        root=jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1),
        slots=jnp.where(active, requests.slots, -1),
        depth_limit=jnp.minimum(requests.draft_limit, remaining - 1),
        node_limit=room - 1,
        vocab_size=model.vocab_size,
    )

    output = model.verify(params, draft, state.cache)
    if output.record is None:
        raise ValueError(f"{type(model).__name__}.verify returned no record, expected what its commit needs")
    depth = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None] if draft.parents is None else depths(draft.parents)
    to_come = requests.min_new - state.new_tokens
    result = accept(
        method,
        output.logits,
        draft,
        seeds=requests.seeds,
        positions=state.lengths[:, None] + depth,
        temperature=requests.temperature,
        filters=requests.filters,
        forbidden=stops.forbidden(model.vocab_size, to_come, depth),
        with_logprobs=state.logprobs is not None,
    )
    outcome = limit_accept(result, stops, state.stop_states, remaining, to_come, room)
    result = outcome.result

    cache = model.backend.update_mamba_state_after_mtp_verify(
        output.cache, output.record, result.last_correct_step_indices
    )
    progress = _progress(draft, output, result)
    drafter_state = update_drafter(drafter, drafter_params, proposal.state, progress, before=state.drafter)
    cache.require_committed("speculative_decode_step")
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


def decode_steps(
    model: SpeculativeModel,
    params: Any,
    state: DecodeState,
    drafter: Drafter,
    method: Method,
    num_drafts: int,
    stops: StopConditions | None,
    num_steps: int,
    drafter_params: Any = None,
) -> DecodeState:
    """`num_steps` steps with a known trip count, so that no predicate travels to the host; arguments as the step's."""
    return loops.fori_loop(
        0,
        num_steps,
        lambda _, carry: speculative_decode_step(
            model, params, carry, drafter, method, num_drafts, stops, drafter_params
        ),
        state,
    )


def decode_until_finished(
    model: SpeculativeModel,
    params: Any,
    state: DecodeState,
    drafter: Drafter,
    method: Method,
    num_drafts: int,
    stops: StopConditions | None = None,
    max_steps: int | None = None,
    drafter_params: Any = None,
) -> DecodeState:
    """Steps until every row has finished, or `max_steps` of them, as one `jax.lax.while_loop`, to embed in a program.

    On a GPU the loop's predicate is read on the host after every step; `generate` avoids that.
    """

    def goes_on(carry):
        state, steps = carry
        return jnp.any(state.active) & (True if max_steps is None else steps < max_steps)

    def step(carry):
        state, steps = carry
        state = speculative_decode_step(model, params, state, drafter, method, num_drafts, stops, drafter_params)
        return state, steps + 1

    return loops.while_loop(goes_on, step, (state, jnp.int32(0)))[0]


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
    drafted = draft.lengths
    if draft.parents is not None:
        real = jnp.arange(draft.parents.shape[1], dtype=jnp.int32)[None] <= draft.lengths[:, None]
        drafted = jnp.sum(real & (draft.parents >= 0), axis=1, dtype=jnp.int32)
    return Statistics(
        passes=statistics.passes + active.astype(jnp.int32),
        drafted=statistics.drafted + jnp.where(active, drafted, 0),
        histogram=statistics.histogram + (accept_lens[:, None] == lengths).astype(jnp.int32),
    )
