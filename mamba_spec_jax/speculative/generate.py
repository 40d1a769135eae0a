"""Whole generations: prompts in, tokens out, in compiled chunks of steps that the host only looks at in between."""

import dataclasses
import math
import numbers
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Int32, Parents, RowFlags, Rows, Tokens
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.cache.tree import depths
from mamba_spec_jax.progress_bar import TOKENS, progress_bar
from mamba_spec_jax.speculative.decode import DecodeState, Statistics, decode_steps, decode_until_finished
from mamba_spec_jax.speculative.depth import AutoDepth, ChunkCosts, DepthPolicy, FixedDepth
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.drafts import propose, require_drafter
from mamba_spec_jax.speculative.prompts import init_decode
from mamba_spec_jax.speculative.protocol import Drafter, SpeculativeModel
from mamba_spec_jax.speculative.sampling import Greedy, Method, Sampling, TokenChoice
from mamba_spec_jax.speculative.stop import StopConditions, StopReason
from mamba_spec_jax.speculative.tree_acceptance import walk_tree
from pallas_kernels import loops

_DEFAULT_DRAFTS = 8  # of prompt lookup
_JUDGED_DRAFTS = 4  # made in a plain chunk; each costs one `propose`


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
        remaining: `[B]` tokens each row may still emit, 0 for those that do not go on.
        passes: `[B]` verify passes each row was active in.
        foreseen: `[J, B]` how many leading tokens of each of J probe drafts, which are not verified, were generated
            later; -1 where there was no draft. J is 0 in chunks that verify drafts.
    """

    lengths: Rows
    emitted: Rows
    tokens: Tokens
    active: RowFlags
    remaining: Rows
    passes: Rows
    foreseen: Int32[Array, "J B"]


def generate(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int] = 128,
    min_new: int | Sequence[int] = 0,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] = 0,
    stops: StopConditions | None = None,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    depth: int | str | DepthPolicy | None = None,
    draft_limit: int | Sequence[int] | None = None,
    logprobs: bool = False,
    chunk_steps: int = 16,
    progress: bool | None = None,
) -> Generation:
    """Generates from ragged prompts.

    What differs between rows or calls is an array of the same two programs, one greedy and one that draws: no option of
    a row makes a call compile again, except a budget for which the cache needs more room.

    Args:
        model: target.
        params: its weights.
        prompts: token ids of each row, at least one each.
        max_new: tokens to emit; like all options up to `seeds`, one value for all rows or one for each.
        min_new: tokens before the one that may stop a row: see `StopConditions`.
        temperature: 0 takes the likeliest token, above it tokens are drawn.
        top_k, top_p, min_p: which likely tokens are drawn from, see `Filters`; 0, 1 and 0 are off.
        seeds: of each row's draws, 0..2**32 - 1; a single number is counted up from row to row. A draw depends on seed
            and position alone.
        stops: what ends a row, besides its budget: nothing by default. A checkpoint's end tokens are
            `StopConditions.create(model.config.eos_token_ids)`; `LoadedModel.generate` stops at them by itself.
        drafter: source of drafts; prompt lookup by default.
        drafter_params: its weights, if it has any.
        depth: drafts a step; "auto" lets measured cost and acceptance decide; the drafter's maximum by default.
        draft_limit: most drafts a step of each row, or one number for all; `depth` by default.
        logprobs: whether to return each emitted token's log-probability.
        chunk_steps: steps compiled into one program; the host looks at the rows only after each. An automatic depth
            takes fewer at a time where it drafts.
        progress: show bars on stderr, for the prompts and for the new tokens; None shows them if that is a terminal.

    Raises:
        ValueError: for prompts, lengths or options that do not fit, or that would have no effect; MemoryError before an
            allocation that cannot.
    """
    state, chunks = start_generation(
        model,
        params,
        prompts,
        max_new=max_new,
        min_new=min_new,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        stops=stops,
        drafter=drafter,
        drafter_params=drafter_params,
        depth=depth,
        draft_limit=draft_limit,
        logprobs=logprobs,
        chunk_steps=chunk_steps,
        progress=progress,
    )
    most = int(np.sum(jax.device_get(_remaining(state))))
    with progress_bar("Generating", most, TOKENS, progress) as bar:
        for newest, report in chunks:
            state = newest
            bar.advance(int(report.emitted.sum()))
    return collect(state)


def start_generation(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new: int | Sequence[int] = 128,
    min_new: int | Sequence[int] = 0,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] = 0,
    stops: StopConditions | None = None,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    depth: int | str | DepthPolicy | None = None,
    draft_limit: int | Sequence[int] | None = None,
    logprobs: bool = False,
    chunk_steps: int = 16,
    progress: bool | None = False,
) -> tuple[DecodeState, Iterator[tuple[DecodeState, ChunkReport]]]:
    """The state after the prompts, and the chunks that go on from it and consume it; arguments as `generate`'s."""
    if drafter is None and drafter_params is not None:
        raise ValueError("drafter_params came without a drafter, expected the drafter whose weights they are")
    drafter, policy = resolve_drafting(drafter, depth)
    if draft_limit is not None and policy.max_drafts == 0:
        raise ValueError(f"draft_limit is {draft_limit!r}, but depth 0 drafts nothing: leave one of them out")
    stops = _stops_of(stops, model.vocab_size)
    if np.any(np.asarray(min_new, object) != 0) and not stops.can_stop:
        raise ValueError(f"min_new is {min_new!r}, but nothing ends a row before max_new: give stops, or leave it out")
    state = init_decode(
        model,
        params,
        prompts,
        drafter=drafter,
        max_drafts=policy.max_drafts,
        max_new=max_new,
        min_new=min_new,
        draft_limit=draft_limit,
        seeds=seeds,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logprobs=logprobs,
        drafter_params=drafter_params,
        progress=progress,
    )
    method = Sampling() if np.any(np.asarray(temperature) > 0) else Greedy()
    return state, decode_chunks(model, params, state, drafter, method, stops, policy, chunk_steps, drafter_params)


def resolve_drafting(drafter: Drafter | None, depth: int | str | DepthPolicy | None) -> tuple[Drafter, DepthPolicy]:
    """The drafter and depth policy that `generate`'s arguments ask for."""
    if isinstance(depth, bool | float) or (isinstance(depth, str) and depth != "auto"):
        raise ValueError(f"depth is {depth!r}, expected a number of drafts, 'auto' or a depth policy")
    if isinstance(depth, numbers.Integral):
        depth = int(depth)
        if depth < 0:
            raise ValueError(f"depth is {depth}, expected at least 0")
    if drafter is None:
        fixed = depth if isinstance(depth, int) else getattr(depth, "max_drafts", _DEFAULT_DRAFTS)
        drafter = NgramDrafter(fixed)
    require_drafter(drafter)
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
    drafter_params: Any = None,
) -> Iterator[tuple[DecodeState, ChunkReport]]:
    """Runs chunks until every row has finished, yielding each chunk's report (on the host) with the newest state.

    On an accelerator the next chunk is enqueued before the last one's report is read, so the device never waits for
    the host. On a CPU, where reading costs nothing and a superfluous chunk does, it is not. The state passed in is
    consumed.
    """
    if chunk_steps < 1:
        raise ValueError(f"chunk_steps is {chunk_steps}, expected at least 1")
    ahead = 0 if _host_is_device() else 1
    remaining = np.asarray(jax.device_get(_remaining(state)))
    most_remaining = int(remaining.max(initial=0))
    policy.start(remaining)
    in_flight: list[_InFlight] = []
    last_read = 0.0
    while most_remaining > 0 or in_flight:
        if most_remaining > 0:
            num_drafts, programs, enqueued = policy.choose(), _compiled_programs(), time.perf_counter()
            steps = policy.steps(num_drafts, chunk_steps)
            state, report = _run_chunk(
                model, params, state, drafter, method, num_drafts, stops, steps, policy.max_drafts, drafter_params
            )
            in_flight.append(_InFlight(report, num_drafts, _compiled_programs() == programs, enqueued))
            most_remaining -= steps  # every active row emits at least one token a step
        if len(in_flight) > ahead or most_remaining <= 0:
            chunk = in_flight.pop(0)
            report = jax.device_get(chunk.report)
            seconds = time.perf_counter() - max(chunk.enqueued, last_read)
            last_read = time.perf_counter()
            policy.observe(_costs(report, chunk.num_drafts, seconds if chunk.was_warm else None))
            yield state, report
            if not report.active.any():
                return


def _stops_of(stops: StopConditions | None, vocab_size: int) -> StopConditions:
    """Stop conditions in the shapes that calls with and without stop strings share."""
    if stops is None:
        stops = StopConditions.create()
    if not isinstance(stops, StopConditions):
        raise ValueError(f"stops is {stops!r}, expected StopConditions: text_stops makes them from a tokenizer")
    return stops.for_vocabulary(vocab_size)


class _InFlight(NamedTuple):
    """A chunk that was enqueued and not yet read; one that had to be compiled first was not warm."""

    report: ChunkReport
    num_drafts: int
    was_warm: bool
    enqueued: float


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


def _chunk(model, params, state, drafter, method, num_drafts, stops, num_steps, max_drafts, drafter_params=None):
    before = state
    looks = 0 if num_drafts or not max_drafts else math.gcd(num_steps, _JUDGED_DRAFTS)

    # A trip count that is known keeps an accelerator from asking the host; a CPU can as well stop in time.
    loop = decode_until_finished if _host_is_device() else decode_steps

    def decode(state, num_steps):
        return loop(model, params, state, drafter, method, num_drafts, stops, num_steps, drafter_params)

    def look_and_decode(state, _):
        requests = state.requests
        choose = TokenChoice(requests.seeds, requests.temperature, method, model.vocab_size, requests.filters)
        proposal = propose(drafter, drafter_params, state.drafter, state.tokens, state.lengths, choose, max_drafts)
        counts = jnp.where(state.active, proposal.lengths, -1)
        return decode(state, num_steps // looks), (proposal.tokens, proposal.parents, counts, state.lengths)

    if looks:
        state, (drafts, parents, counts, starts) = loops.scan(look_and_decode, state, length=looks)
        foreseen = jax.vmap(_foreseen, in_axes=(0, 0, 0, 0, None))(drafts, parents, counts, starts, state)
    else:
        state = decode(state, num_steps)
        foreseen = jnp.zeros((0, state.lengths.size), jnp.int32)
    report = ChunkReport(
        lengths=state.lengths,
        emitted=state.lengths - before.lengths,
        tokens=_window(state.tokens, before.lengths, num_steps * (num_drafts + 1)),
        active=state.active,
        remaining=_remaining(state),
        passes=state.statistics.passes - before.statistics.passes,
        foreseen=foreseen,
    )
    return state, report


_run_chunk = jax.jit(_chunk, static_argnums=(0, 3, 4, 5, 7, 8), donate_argnums=2)


def _host_is_device() -> bool:
    return jax.default_backend() == "cpu"


def _compiled_programs() -> int:
    """How many chunk programs exist: a chunk whose call adds one has spent its time compiling."""
    return _run_chunk._cache_size()  # type: ignore[attr-defined]


def _window(tokens: Tokens, start: Rows, size: int) -> Tokens:
    columns = start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
    return jnp.take_along_axis(tokens, jnp.minimum(columns, tokens.shape[1] - 1), axis=1)


def _remaining(state: DecodeState) -> Rows:
    return jnp.where(state.active, state.requests.max_new - state.new_tokens, 0)


def _foreseen(drafts: Tokens, parents: Parents | None, counts: Rows, starts: Rows, state: DecodeState) -> Rows:
    """How many of the first `counts[b]` drafts came true in what was decoded from `starts[b]` on; -1 for count -1.

    Of a tree, as many as its deepest path that came true is long.
    """
    decoded = state.lengths - starts
    if parents is not None:
        depth = depths(parents)
        targets = jnp.take_along_axis(state.tokens, jnp.minimum(starts[:, None] + depth, state.tokens.shape[1] - 1), 1)
        draft = Draft(jnp.pad(drafts, ((0, 0), (1, 0))), counts, state.requests.slots, parents=parents)
        node, _ = walk_tree(draft, targets)
        reached = jnp.take_along_axis(depth, node[:, None], axis=1)[:, 0]
        return jnp.where(counts < 0, -1, jnp.minimum(reached, decoded))
    following = _window(state.tokens, starts, drafts.shape[1])
    real = jnp.arange(drafts.shape[1], dtype=jnp.int32)[None] < jnp.minimum(counts, decoded)[:, None]
    right = jnp.cumprod(real & (drafts == following), axis=1, dtype=jnp.int32)
    return jnp.where(counts < 0, -1, jnp.sum(right, axis=1, dtype=jnp.int32))


def _costs(report: ChunkReport, num_drafts: int, seconds: float | None) -> ChunkCosts:
    tokens, passes, remaining, foreseen = map(
        np.asarray, (report.emitted, report.passes, report.remaining, report.foreseen)
    )
    steps = max(1, int(passes.max()))  # those in which no row was active count for nothing
    if not num_drafts:
        # Drafts are made at places spread evenly over the text, most of which long copies cover. Their mean would be
        # far above that of consecutive passes, which see each copy once: it is passes per token that may be averaged.
        passes = (foreseen >= 0).sum(axis=0)
        passes_per_token = np.where(foreseen >= 0, 1 / (1.0 + foreseen.clip(0)), 0).sum(axis=0)
        tokens = passes**2 / np.where(passes, passes_per_token, 1)
    return ChunkCosts(num_drafts, steps, None if seconds is None else seconds / steps, tokens, passes, remaining)
