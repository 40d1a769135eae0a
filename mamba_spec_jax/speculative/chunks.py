"""Compiled chunks of steps, which the host only looks at in between."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Int32, RowFlags, Rows, Tokens
from mamba_spec_jax.speculative.compiled_programs import program_count
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.draft_policy import ChunkCosts, DraftPolicy, FixedDrafts
from mamba_spec_jax.speculative.hindsight import judge, probe, text_at
from mamba_spec_jax.speculative.state import DecodeState, Weights
from pallas_kernels import loops

CHUNK_STEPS = 16
_PROBES = 4  # of a plain chunk; each costs one `propose`


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


def decode_chunks(
    decoder: Decoder,
    weights: Weights,
    state: DecodeState,
    policy: DraftPolicy | None = None,
    chunk_steps: int = CHUNK_STEPS,
) -> Iterator[tuple[DecodeState, ChunkReport]]:
    """Runs chunks until every row has finished, yielding each chunk's report (on the host) with the newest state.

    On an accelerator the next chunk is enqueued before the last one's report is read, so the device never waits for
    the host. On a CPU, where reading costs nothing and a superfluous chunk does, it is not.

    Args:
        decoder: with the most drafts that a step makes.
        weights: of target and drafter.
        state: consumed.
        policy: how many drafts each chunk makes; by default as many as the decoder's.
        chunk_steps: steps compiled into one program.
    """
    policy = FixedDrafts(decoder.num_drafts) if policy is None else policy
    if chunk_steps < 1:
        raise ValueError(f"chunk_steps is {chunk_steps}, expected at least 1")
    ahead = 0 if _host_is_device() else 1
    remaining = np.asarray(jax.device_get(state.remaining))
    most_remaining = int(remaining.max(initial=0))
    policy.start(remaining)
    in_flight: list[_InFlight] = []
    last_read = 0.0
    while most_remaining > 0 or in_flight:
        if most_remaining > 0:
            num_drafts, programs, enqueued = policy.choose(), program_count(_run_chunk), time.perf_counter()
            steps = policy.steps(num_drafts, chunk_steps)
            state, report = _run_chunk(decoder, weights, state, num_drafts, steps)
            in_flight.append(_InFlight(report, num_drafts, program_count(_run_chunk) == programs, enqueued))
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


class _InFlight(NamedTuple):
    """A chunk that was enqueued and not yet read; one that had to be compiled first was not warm."""

    report: ChunkReport
    num_drafts: int
    was_warm: bool
    enqueued: float


def _chunk(decoder, weights, state, num_drafts, num_steps):
    before, stepper = state, dataclasses.replace(decoder, num_drafts=num_drafts)
    num_probes = 0 if num_drafts or not decoder.num_drafts else math.gcd(num_steps, _PROBES)
    # A trip count that is known keeps an accelerator from asking the host; a CPU can as well stop in time.
    decode = stepper.until_finished if _host_is_device() else stepper.steps
    if num_probes:
        state, probes = loops.scan(
            lambda state, _: (decode(weights, state, num_steps // num_probes), probe(decoder, weights, state)),
            state,
            length=num_probes,
        )
        foreseen = judge(probes, state)
    else:
        state = decode(weights, state, num_steps)
        foreseen = jnp.zeros((0, state.lengths.size), jnp.int32)
    columns = jnp.arange(num_steps * (num_drafts + 1), dtype=jnp.int32)[None]
    report = ChunkReport(
        lengths=state.lengths,
        emitted=state.lengths - before.lengths,
        tokens=text_at(state, before.lengths[:, None] + columns),
        active=state.active,
        remaining=state.remaining,
        passes=state.statistics.passes - before.statistics.passes,
        foreseen=foreseen,
    )
    return state, report


_run_chunk = jax.jit(_chunk, static_argnames=("num_drafts", "num_steps"), donate_argnames="state")


def _host_is_device() -> bool:
    return jax.default_backend() == "cpu"


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
