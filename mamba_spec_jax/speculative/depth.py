"""How many tokens to draft: a fixed number, or whatever pays, from measured cost and acceptance."""

import dataclasses
from typing import Protocol

import numpy as np

# Tokens emitted by passes that nobody has seen: so many passes of one token each count as evidence against drafts, and
# as many of the batch's mean rate count towards a row's.
_PRIOR_PASSES = 4


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """What a finished chunk of steps says to a depth policy.

    Attributes:
        num_drafts: K it ran with.
        seconds_per_step: wall time of one step; None where it says nothing, as when the chunk was compiled first.
        tokens: `[B]` tokens that full-depth passes emitted in each row, measured, or judged in hindsight by drafts that
            were made on the way and compared with what was then decoded plainly.
        passes: `[B]` how many passes those were; 0 in rows that say nothing.
        remaining: `[B]` tokens each row may still emit; 0 in finished rows.
    """

    num_drafts: int
    seconds_per_step: float | None
    tokens: np.ndarray
    passes: np.ndarray
    remaining: np.ndarray


class DepthPolicy(Protocol):
    """Chooses the drafts of the next chunk of steps."""

    @property
    def max_drafts(self) -> int: ...

    def choose(self) -> int: ...

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        """How many steps a chunk of this depth runs, where a plain one runs `chunk_steps`; each number is compiled."""
        ...

    def observe(self, costs: ChunkCosts) -> None: ...


@dataclasses.dataclass(frozen=True)
class FixedDepth:
    """Always `max_drafts` drafts."""

    max_drafts: int

    def choose(self) -> int:
        return self.max_drafts

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        return chunk_steps

    def observe(self, costs: ChunkCosts) -> None:
        """A fixed depth learns nothing."""


class AutoDepth:
    """Full depth while the batch will be done sooner with it; plain steps otherwise.

    Costs are the least seen of each kind of step, since noise only ever adds. Each row has a running mean of the tokens
    a full-depth pass emits, weighted by the passes behind it and drawn towards the batch's where they are few. A batch
    is done when its slowest row is, so what counts is how much sooner that one would be.

    While plain steps run, the drafter is judged in hindsight, so no pass is spent on finding out whether drafts are
    worth it: the first chunk is plain, and full depth is tried once hindsight promises enough. Chunks at full depth are
    short, so that a try costs little where it disappoints. An instance may serve many generations of one model and
    batch size: what it has learnt of costs stays.

    Attributes:
        max_drafts: K of a full-depth pass.
        promise: how many times fewer steps hindsight must promise for a first try, while its cost is unknown. A try
            weighs less the longer plain steps have run, so less is asked for then: half the surplus after 16 chunks.
        margin: how much sooner than with plain steps the batch must be done for full depth to be taken up again.
        memory: weight of what was seen earlier, chunk by chunk.
    """

    def __init__(self, max_drafts: int, *, promise: float = 2.0, margin: float = 0.25, memory: float = 0.75):
        if max_drafts < 1:
            raise ValueError(f"AutoDepth.max_drafts is {max_drafts}, expected at least 1")
        self.max_drafts = max_drafts
        self.promise = promise
        self.margin = margin
        self.memory = memory
        self._seconds: dict[int, float] = {}
        self._tokens = self._passes = np.zeros(0)
        self._depth = 0
        self._plain_chunks = 0

    @property
    def cost_ratio(self) -> float | None:
        """Cost of a full-depth step over that of a plain one; None until both were measured."""
        if len(self._seconds) < 2:
            return None
        return self._seconds[self.max_drafts] / self._seconds[0]

    def choose(self) -> int:
        return self._depth

    def steps(self, num_drafts: int, chunk_steps: int) -> int:
        return max(1, chunk_steps // 4) if num_drafts else chunk_steps

    def observe(self, costs: ChunkCosts) -> None:
        seconds, depth = costs.seconds_per_step, costs.num_drafts
        if seconds is not None:
            self._seconds[depth] = min(seconds, self._seconds.get(depth, seconds))
        self._plain_chunks += not depth
        if self._passes.shape != costs.passes.shape:
            self._tokens = self._passes = np.zeros(costs.passes.shape)
        self._tokens = self.memory * self._tokens + costs.tokens
        self._passes = self.memory * self._passes + costs.passes
        if 0 not in self._seconds or not costs.remaining.any():
            return
        fewer_steps = costs.remaining.max() / (costs.remaining / self._rates()).max()
        if self.cost_ratio is None:
            worth_it = fewer_steps >= 1 + (self.promise - 1) * 16 / (16 + self._plain_chunks)
        else:
            worth_it = fewer_steps / self.cost_ratio > (1.0 if self._depth else 1 + self.margin)
        self._depth = self.max_drafts if worth_it else 0

    def _rates(self) -> np.ndarray:
        """`[B]` tokens that a full-depth pass is expected to emit."""
        mean = (self._tokens.sum() + _PRIOR_PASSES) / (self._passes.sum() + _PRIOR_PASSES)
        return (self._tokens + _PRIOR_PASSES * mean) / (self._passes + _PRIOR_PASSES)
