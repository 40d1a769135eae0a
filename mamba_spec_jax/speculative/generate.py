"""Whole generations: prompts in, tokens out."""

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from mamba_spec_jax.progress_bar import TOKENS, progress_bar
from mamba_spec_jax.speculative.chunks import CHUNK_STEPS, ChunkReport, decode_chunks
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.draft_policy import AutoDrafts, DraftPolicy, FixedDrafts
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.drafts import require_drafter
from mamba_spec_jax.speculative.protocol import Drafter, SpeculativeModel
from mamba_spec_jax.speculative.requests import GenerationOptions, Requests, RowOptions, named_options
from mamba_spec_jax.speculative.sampling import Greedy, Sampling
from mamba_spec_jax.speculative.state import DecodeState, Statistics, Weights
from mamba_spec_jax.speculative.stop import StopConditions, StopReason

_DEFAULT_DRAFTS = 8  # of prompt lookup


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


@named_options(Requests.create)
def start_generation(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    stops: StopConditions | None = None,
    progress: bool | None = False,
    num_drafts: int | str | DraftPolicy | None = None,
    logprobs: bool = False,
    chunk_steps: int = CHUNK_STEPS,
    **rows: Unpack[RowOptions],
) -> tuple[DecodeState, Iterator[tuple[DecodeState, ChunkReport]]]:
    """The state after the prompts, and the chunks that go on from it and consume it; arguments as `generate`'s."""
    if drafter is None and drafter_params is not None:
        raise ValueError("drafter_params came without a drafter, expected the drafter whose weights they are")
    drafter, policy = resolve_drafting(drafter, num_drafts)
    limit, min_new = rows.get("depth_limit"), rows.get("min_new", 0)
    if limit is not None and policy.max_drafts == 0:
        raise ValueError(f"depth_limit is {limit!r}, but num_drafts 0 drafts nothing: leave one of them out")
    stops = _stops_of(stops, model.vocab_size)
    if np.any(np.asarray(min_new, object) != 0) and not stops.can_stop:
        raise ValueError(f"min_new is {min_new!r}, but nothing ends a row before max_new: give stops, or leave it out")
    decoder, weights = Decoder(model, drafter, Sampling(), policy.max_drafts), Weights(params, drafter_params)
    state = decoder.init(weights, prompts, stops=stops, logprobs=logprobs, progress=progress, **rows)
    if not np.any(np.asarray(rows.get("temperature", 0)) > 0):
        decoder = dataclasses.replace(decoder, method=Greedy())
    return state, decode_chunks(decoder, weights, state, policy, chunk_steps)


@named_options(start_generation)
def generate(
    model: SpeculativeModel,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    stops: StopConditions | None = None,
    progress: bool | None = None,
    **options: Unpack[GenerationOptions],
) -> Generation:
    """Generates from ragged prompts.

    What differs between rows or calls is an array of the same two programs, one greedy and one that draws: no option of
    a row makes a call compile again, except a budget for which the cache needs more room.

    Args:
        model: target.
        params: its weights.
        prompts: token ids of each row, at least one each.
        drafter: source of drafts; prompt lookup by default.
        drafter_params: its weights, if it has any.
        stops: what ends a row, besides its budget: nothing by default. A checkpoint's end tokens are
            `StopConditions.create(model.config.eos_token_ids)`; `LoadedModel.generate` stops at them by itself.
        progress: show bars on stderr, for the prompts and for the new tokens; None shows them if that is a terminal.
        **options: see `GenerationOptions`.

    Raises:
        ValueError: for prompts, lengths or options that do not fit, or that would have no effect; MemoryError before an
            allocation that cannot.
    """
    state, chunks = start_generation(
        model,
        params,
        prompts,
        drafter=drafter,
        drafter_params=drafter_params,
        stops=stops,
        progress=progress,
        **options,
    )
    most = int(np.sum(jax.device_get(state.remaining)))
    with progress_bar("Generating", most, TOKENS, progress) as bar:
        for newest, report in chunks:
            state = newest
            bar.advance(int(report.emitted.sum()))
    return collect(state)


def resolve_drafting(
    drafter: Drafter | None, num_drafts: int | str | DraftPolicy | None
) -> tuple[Drafter, DraftPolicy]:
    """The drafter and draft policy that `generate`'s arguments ask for."""
    if isinstance(num_drafts, bool | float) or (isinstance(num_drafts, str) and num_drafts != "auto"):
        raise ValueError(f"num_drafts is {num_drafts!r}, expected a number of drafts, 'auto' or a draft policy")
    if isinstance(num_drafts, numbers.Integral):
        num_drafts = int(num_drafts)
        if num_drafts < 0:
            raise ValueError(f"num_drafts is {num_drafts}, expected at least 0")
    if drafter is None:
        fixed = num_drafts if isinstance(num_drafts, int) else getattr(num_drafts, "max_drafts", _DEFAULT_DRAFTS)
        drafter = NgramDrafter(fixed)
    require_drafter(drafter)
    policy: DraftPolicy
    if num_drafts is None or isinstance(num_drafts, int):
        policy = FixedDrafts(drafter.max_drafts if num_drafts is None else num_drafts)
    elif isinstance(num_drafts, str):
        policy = AutoDrafts(drafter.max_drafts)
    else:
        policy = num_drafts
    if policy.max_drafts > drafter.max_drafts:
        raise ValueError(
            f"num_drafts is {policy.max_drafts}, but the drafter proposes at most {drafter.max_drafts} tokens"
        )
    return drafter, policy


def _stops_of(stops: StopConditions | None, vocab_size: int) -> StopConditions:
    """Stop conditions in the shapes that calls with and without stop strings share."""
    if stops is None:
        stops = StopConditions.create()
    if not isinstance(stops, StopConditions):
        raise ValueError(f"stops is {stops!r}, expected StopConditions: text_stops makes them from a tokenizer")
    return stops.for_vocabulary(vocab_size)


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
