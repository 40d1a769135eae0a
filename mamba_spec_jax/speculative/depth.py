"""How many tokens to draft: a fixed number, or whatever pays, from measured cost and acceptance."""

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class ChunkCosts:
    """What a finished chunk of steps says to a depth policy.

    Attributes:
        num_drafts: K it ran with.
        seconds_per_step: wall time of one step; None where it says nothing, as when the chunk was compiled first.
        tokens_per_pass: mean tokens emitted per active row and step; None if no row was active.
        expected_tokens_per_pass: what a full-depth pass would have emitted, judged in hindsight by a draft made at the
            chunk's start and compared with what was then decoded; None where it was not judged.
    """

    num_drafts: int
    seconds_per_step: float | None
    tokens_per_pass: float | None
    expected_tokens_per_pass: float | None


class DepthPolicy(Protocol):
    """Chooses the drafts of the next chunk of steps."""

    @property
    def max_drafts(self) -> int: ...

    def choose(self) -> int: ...

    def observe(self, costs: ChunkCosts) -> None: ...


@dataclasses.dataclass(frozen=True)
class FixedDepth:
    """Always `max_drafts` drafts."""

    max_drafts: int

    def choose(self) -> int:
        return self.max_drafts

    def observe(self, costs: ChunkCosts) -> None:
        """A fixed depth learns nothing."""


class AutoDepth:
    """Full depth while a pass emits more tokens than it costs in plain steps; plain steps otherwise.

    Costs are the least seen of each kind of step, since noise only ever adds. Acceptance is a running mean that follows
    the text. While plain steps run, the drafter is judged in hindsight, so no pass is spent on finding out whether
    drafts are worth it: the first chunks are plain, and full depth is tried once hindsight promises `promise` tokens a
    pass. An instance may serve many generations of one model and batch size: what it has learnt of costs stays.

    Attributes:
        max_drafts: K of a full-depth pass.
        promise: tokens a pass, judged in hindsight, for which full depth is worth a first try.
        margin: how much better than plain steps full depth must promise to be before it is taken up again.
        smoothing: weight of the newest chunk in the running mean.
    """

    def __init__(self, max_drafts: int, *, promise: float = 2.0, margin: float = 0.1, smoothing: float = 0.4):
        if max_drafts < 1:
            raise ValueError(f"AutoDepth.max_drafts is {max_drafts}, expected at least 1")
        self.max_drafts = max_drafts
        self.promise = promise
        self.margin = margin
        self.smoothing = smoothing
        self._seconds: dict[int, float] = {}
        self._tokens: float | None = None
        self._depth = 0

    @property
    def cost_ratio(self) -> float | None:
        """Cost of a full-depth step over that of a plain one; None until both were measured."""
        if len(self._seconds) < 2:
            return None
        return self._seconds[self.max_drafts] / self._seconds[0]

    def choose(self) -> int:
        return self._depth

    def observe(self, costs: ChunkCosts) -> None:
        seconds, depth = costs.seconds_per_step, costs.num_drafts
        if seconds is not None:
            self._seconds[depth] = min(seconds, self._seconds.get(depth, seconds))
        tokens = costs.tokens_per_pass if depth else costs.expected_tokens_per_pass
        if tokens is not None:
            previous = tokens if self._tokens is None else self._tokens
            self._tokens = previous + self.smoothing * (tokens - previous)
        if 0 not in self._seconds or self._tokens is None:
            return
        if self.cost_ratio is None:
            self._depth = self.max_drafts if self._tokens >= self.promise else 0
            return
        gain = self._tokens / self.cost_ratio
        threshold = 1.0 if self._depth else 1 + self.margin
        self._depth = self.max_drafts if gain > threshold else 0
