"""How many tokens to draft: a fixed number, or whatever pays, from measured cost and acceptance."""

import dataclasses
import math
from typing import Protocol

import numpy as np

# Tokens emitted by passes that nobody has seen: so many passes of one token each count as evidence against drafts, and
# as many of the batch's mean rate count towards a row's.
_PRIOR_PASSES = 4
_SHORTER_CHUNKS = 16  # a full chunk has so many times fewer steps than a plain one
_UNKNOWN_RATIO = 2.0  # cost of a full step over that of a plain one, before it was measured


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """What a finished chunk of steps says to a draft policy.

    Attributes:
        num_drafts: K it ran with.
        steps: how many it ran.
        seconds_per_step: wall time of one step; None where it says nothing, as when the chunk was compiled first.
        tokens: `[B]` tokens that full passes emitted in each row, measured, or judged in hindsight by drafts that
            were made on the way and compared with what was then decoded plainly.
        passes: `[B]` how many passes those were; 0 in rows that say nothing.
        remaining: `[B]` tokens each row may still emit; 0 in finished rows.
    """

    num_drafts: int
    steps: int
    seconds_per_step: float | None
    tokens: np.ndarray
    passes: np.ndarray
    remaining: np.ndarray


class DraftPolicy(Protocol):
    """Chooses the drafts of the next chunk of steps."""

    @property
    def max_drafts(self) -> int: ...

    def start(self, remaining: np.ndarray) -> None:
        """A generation begins, whose rows may emit `remaining [B]` tokens."""
        ...

    def choose(self) -> int: ...

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        """How many steps a chunk runs, where a plain one runs `chunk_steps`; each number is compiled."""
        ...

    def observe(self, costs: ChunkCosts) -> None: ...


@dataclasses.dataclass(frozen=True)
class FixedDrafts:
    """Always `max_drafts` drafts."""

    max_drafts: int

    def start(self, remaining: np.ndarray) -> None:
        """Every generation is like any other."""

    def choose(self) -> int:
        return self.max_drafts

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        return chunk_steps

    def observe(self, costs: ChunkCosts) -> None:
        """A fixed number learns nothing."""


class AutoDrafts:
    """Full drafts, `max_drafts` a step, while the batch will be done sooner with them; plain steps otherwise.

    Costs are the least seen of each kind of step, since noise only ever adds. Each row has a running mean of the tokens
    a full pass emits, weighted by the passes behind it and drawn towards the batch's where they are few. A batch
    is done when its slowest row is, so what counts is how much sooner that one would be.

    While plain steps run, the drafter is judged in hindsight, so no pass is spent on finding out whether drafts are
    worth it: the first chunk is plain, and full drafts are tried once hindsight promises enough. Estimates mislead, so
    full drafts are a bet with a stake: they run only while the batch, should the next passes emit one token each, would
    still be done within `1 + stake` times the plain steps. What was won adds to what may be lost. Chunks of full drafts
    are short for the same reason. An instance may serve many generations, one after another, of one model and batch
    size: what it has learnt of costs stays.

    Attributes:
        max_drafts: K of a full pass.
        promise: how many times fewer steps hindsight must promise for a first try, while its cost is unknown. A try
            weighs less the longer plain steps have run, so less is asked for then: half the surplus after 16 chunks,
            but never less than the margin.
        margin: how much sooner than with plain steps the batch must be done for full drafts to be taken up again.
        memory: weight of what was seen earlier, pass by pass.
        stake: what may be lost, as a share of the plain steps of the whole generation.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        promise: float = 1.5,
        margin: float = 0.1,
        memory: float = 0.93,
        stake: float = 0.03,
    ):
        if max_drafts < 1:
            raise ValueError(f"AutoDrafts.max_drafts is {max_drafts}, expected at least 1")
        self.max_drafts = max_drafts
        self.promise = promise
        self.margin = margin
        self.memory = memory
        self.stake = stake
        self._seconds: dict[int, float] = {}
        self.start(np.zeros(0))

    @property
    def cost_ratio(self) -> float | None:
        """Cost of a full step over that of a plain one; None until both were measured."""
        if len(self._seconds) < 2:
            return None
        return self._seconds[self.max_drafts] / self._seconds[0]

    def start(self, remaining: np.ndarray) -> None:
        self._tokens = self._passes = np.zeros(remaining.shape)
        self._num_drafts = 0
        self._plain_chunks = 0
        self._plain_steps = self._remaining = remaining.max(initial=0)  # of all of it, and to do, were they all plain
        self._steps = [0, 0]  # run plainly, and with full drafts
        self._bet = 1  # steps of the next chunk with full drafts

    def choose(self) -> int:
        return self._num_drafts

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        self._bet = max(1, chunk_steps // _SHORTER_CHUNKS)
        return self._bet if num_drafts else chunk_steps

    def observe(self, costs: ChunkCosts) -> None:
        if costs.seconds_per_step is not None:
            least = self._seconds.get(costs.num_drafts, math.inf)
            self._seconds[costs.num_drafts] = min(costs.seconds_per_step, least)
        self._remaining = costs.remaining.max()
        self._steps[costs.num_drafts > 0] += costs.steps
        self._plain_chunks += not costs.num_drafts
        kept = self.memory ** costs.passes.max()
        self._tokens = kept * self._tokens + costs.tokens
        self._passes = kept * self._passes + costs.passes
        if 0 in self._seconds and costs.remaining.any():
            worth_it = self._is_promising(costs.remaining) and self._is_covered()
            self._num_drafts = self.max_drafts if worth_it else 0

    def _is_promising(self, remaining: np.ndarray) -> bool:
        fewer_steps = remaining.max() / (remaining / self._rates()).max()
        if self.cost_ratio is None:
            promise = 1 + (self.promise - 1) * 16 / (16 + self._plain_chunks)
            return fewer_steps > max(promise, 1 + self.margin)
        return fewer_steps / self.cost_ratio > (1.0 if self._num_drafts else 1 + self.margin)

    def _is_covered(self) -> bool:
        """Whether a chunk whose passes emit one token each would leave the losses within the stake."""
        ratio = _UNKNOWN_RATIO if self.cost_ratio is None else self.cost_ratio
        plain, full = self._steps
        lost = plain + full * ratio + self._remaining - self._plain_steps
        return lost + self._bet * (ratio - 1) <= self.stake * self._plain_steps

    def _rates(self) -> np.ndarray:
        """`[B]` tokens that a full pass is expected to emit."""
        mean = (self._tokens.sum() + _PRIOR_PASSES) / (self._passes.sum() + _PRIOR_PASSES)
        return (self._tokens + _PRIOR_PASSES * mean) / (self._passes + _PRIOR_PASSES)
