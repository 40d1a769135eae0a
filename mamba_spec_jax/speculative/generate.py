"""Whole generations: prompts in, tokens out, in compiled chunks of steps that the host only looks at in between."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import RowFlags, Rows, Tokens
from mamba_spec_jax.speculative.decode import DecodeState, Statistics, decode_steps
from mamba_spec_jax.speculative.depth import AutoDepth, ChunkCosts, DepthPolicy, FixedDepth
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.prompts import init_decode
from mamba_spec_jax.speculative.protocol import Drafter, Proposal, SpeculativeModel
from mamba_spec_jax.speculative.sampling import Greedy, Method
from mamba_spec_jax.speculative.stop import StopConditions, StopReason


@dataclasses.dataclass(frozen=True)
class Generation:
    """What a generation produced, on the host.

    Attributes:
        tokens: emitted tokens of each row, prompt not included; a stopping token is.
        reasons: why each row stopped.
        statistics: counts, as NumPy arrays.
        logprobs: log-probability of each emitted token under the target; None unless asked for.
    """

    tokens: list[list[int]]
    reasons: list[StopReason]
    statistics: Statistics
    logprobs: list[list[float]] | None = None


@flax.struct.dataclass
class ChunkReport:
    """What the host may know of a chunk of steps, apart from the state so that the state can be donated onward.

    Attributes:
        lengths: `[B]` tokens of each row after the chunk.
        emitted: `[B]` tokens emitted in the chunk.
        tokens: `[B, N T]` those tokens.
        active: `[B]` rows that go on.
        passes: `[B]` verify passes each row was active in.
        foreseen: `[B]` leading tokens of a draft made at the chunk's start that came true; -1 where none was made.
    """

    lengths: Rows
    emitted: Rows
    tokens: Tokens
    active: RowFlags
    passes: Rows
    foreseen: Rows


def generate(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    depth: int | str | DepthPolicy | None = None,
    method: Method = Greedy(),  # noqa: B008, frozen
    stops: StopConditions | None = None,
    chunk_steps: int = 16,
    **requests: Any,
) -> Generation:
    """Generates from ragged prompts.

    Args:
        model: target.
        params: its weights.
        prompts: token ids of each row, at least one each.
        drafter: source of drafts; prompt lookup by default.
        depth: drafts a step; "auto" lets measured cost and acceptance decide; the drafter's maximum by default.
        method: how tokens are chosen.
        stops: what ends a row, besides its budget.
        chunk_steps: steps compiled into one program; the host looks at the rows only after each.
        **requests: of the rows, see `init_decode`: max_new, min_new, draft_limit, seeds, temperature, logprobs.

    Raises:
        ValueError: for prompts, lengths or options that do not fit; MemoryError before an allocation that cannot.
    """
    drafter, policy = resolve_drafting(drafter, depth)
    state = init_decode(model, params, prompts, drafter=drafter, max_drafts=policy.max_drafts, **requests)
    for newest, _ in decode_chunks(model, params, state, drafter, method, stops, policy, chunk_steps):
        state = newest
    return collect(state)


def resolve_drafting(drafter: Drafter | None, depth: int | str | DepthPolicy | None) -> tuple[Drafter, DepthPolicy]:
    """The drafter and depth policy that `generate`'s arguments stand for."""
    if isinstance(depth, str) and depth != "auto":
        raise ValueError(f"depth is {depth!r}, expected a number of drafts, 'auto' or a depth policy")
    if isinstance(depth, int) and depth < 0:
        raise ValueError(f"depth is {depth}, expected at least 0")
    if drafter is None:
        drafter = NgramDrafter(depth if isinstance(depth, int) else 8)
    policy: DepthPolicy
    if depth is None or isinstance(depth, int):
        policy = FixedDepth(drafter.max_drafts if depth is None else depth)
    elif isinstance(depth, str):
        policy = AutoDepth(drafter.max_drafts)
    else:
        policy = depth
    if policy.max_drafts > drafter.max_drafts:
        raise ValueError(f"depth is {policy.max_drafts}, but the drafter proposes at most {drafter.max_drafts} tokens")
    return drafter, policy


def decode_chunks(
    model: SpeculativeModel,
    params: Any,
    state: DecodeState,
    drafter: Drafter,
    method: Method,
    stops: StopConditions | None,
    policy: DepthPolicy,
    chunk_steps: int,
) -> Iterator[tuple[DecodeState, ChunkReport]]:
    """Runs chunks until every row has finished, yielding each chunk's report (on the host) with the newest state.

    On an accelerator the next chunk is enqueued before the last one's report is read, so the device never waits for
    the host. On a CPU, where reading costs nothing and a superfluous chunk does, it is not. The state passed in is
    consumed.
    """
    if chunk_steps < 1:
        raise ValueError(f"chunk_steps is {chunk_steps}, expected at least 1")
    stops = StopConditions.create() if stops is None else stops
    ahead = 0 if jax.default_backend() == "cpu" else 1
    most_remaining = int(np.max(jax.device_get(jnp.where(state.active, state.requests.max_new - state.new_tokens, 0))))
    in_flight: list[tuple[ChunkReport, int, bool, float]] = []
    last_read = 0.0
    while most_remaining > 0 or in_flight:
        if most_remaining > 0:
            num_drafts, programs, enqueued = policy.choose(), _compiled_programs(), time.perf_counter()
            state, report = _run_chunk(
                model, params, state, drafter, method, num_drafts, stops, chunk_steps, policy.max_drafts
            )
            in_flight.append((report, num_drafts, _compiled_programs() == programs, enqueued))
            most_remaining -= chunk_steps  # every active row emits at least one token a step
        if len(in_flight) > ahead or most_remaining <= 0:
            device_report, num_drafts, was_warm, enqueued = in_flight.pop(0)
            report = jax.device_get(device_report)
            seconds = time.perf_counter() - max(enqueued, last_read)
            last_read = time.perf_counter()
            policy.observe(_costs(report, num_drafts, seconds / chunk_steps if was_warm else None))
            yield state, report
            if not report.active.any():
                return


def collect(state: DecodeState) -> Generation:
    """A finished state as lists on the host."""
    fields = (state.tokens, state.lengths, state.prompt_lengths, state.reasons, state.statistics, state.logprobs)
    tokens, lengths, prompts, reasons, statistics, logprobs = jax.device_get(fields)
    spans = list(zip(prompts.tolist(), lengths.tolist(), strict=True))
    return Generation(
        tokens=[tokens[row, start:end].tolist() for row, (start, end) in enumerate(spans)],
        reasons=[StopReason(reason) for reason in reasons.tolist()],
        statistics=statistics,
        logprobs=None
        if logprobs is None
        else [logprobs[row, start:end].tolist() for row, (start, end) in enumerate(spans)],
    )


def _chunk(model, params, state, drafter, method, num_drafts, stops, num_steps, max_drafts):
    before = state
    foreseen = jnp.full_like(state.lengths, -1)
    judged = num_drafts == 0 and max_drafts > 0
    if judged:
        proposal = drafter.propose(state.drafter, state.tokens, state.lengths, max_drafts)
    state = decode_steps(model, params, state, drafter, method, num_drafts, stops, num_steps)
    window = _window(state.tokens, before.lengths, num_steps * (num_drafts + 1))
    if judged:
        foreseen = _foreseen(proposal, window, state.lengths - before.lengths, before.active)
    report = ChunkReport(
        lengths=state.lengths,
        emitted=state.lengths - before.lengths,
        tokens=window,
        active=state.active,
        passes=state.statistics.passes - before.statistics.passes,
        foreseen=foreseen,
    )
    return state, report


_run_chunk = jax.jit(_chunk, static_argnums=(0, 3, 4, 5, 7, 8), donate_argnums=2)


def _compiled_programs() -> int:
    """How many chunk programs exist: a chunk whose call adds one has spent its time compiling."""
    return _run_chunk._cache_size()  # type: ignore[attr-defined]


def _window(tokens: Tokens, start: Rows, size: int) -> Tokens:
    columns = start[:, None] + jnp.arange(size)
    return jnp.take_along_axis(tokens, jnp.minimum(columns, tokens.shape[1] - 1), axis=1)


def _foreseen(proposal: Proposal, window: Tokens, emitted: Rows, active: RowFlags) -> Rows:
    """How many leading drafts turned out right, for rows that decoded far enough to tell."""
    K = min(proposal.tokens.shape[1], window.shape[1])
    real = jnp.arange(K) < jnp.minimum(proposal.lengths, emitted)[:, None]
    right = jnp.cumprod(real & (proposal.tokens[:, :K] == window[:, :K]), axis=1, dtype=jnp.int32)
    return jnp.where(active, jnp.sum(right, axis=1, dtype=jnp.int32), -1)


def _costs(report: ChunkReport, num_drafts: int, seconds_per_step: float | None) -> ChunkCosts:
    judged = report.foreseen >= 0
    return ChunkCosts(
        num_drafts=num_drafts,
        seconds_per_step=seconds_per_step,
        tokens_per_pass=float(report.emitted.sum() / report.passes.sum()) if report.passes.any() else None,
        expected_tokens_per_pass=1 + float(report.foreseen[judged].mean()) if judged.any() else None,
    )
