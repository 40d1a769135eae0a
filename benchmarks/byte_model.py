"""Bytes of device memory that a verify step moves, by formula, for one row and one layer.

S bytes of a state, r of a token's inputs in the ring, T tokens of a pass, a of them accepted (the bonus token counted),
Q the ring's length, p tokens of history that a pass reads, f the share of passes that fold. p and f are not guessed:
`steady_state` runs the cursors by the rule that the library runs them by.
"""

import dataclasses
import functools

import numpy as np

from benchmarks.published import Model
from pallas_kernels.decode_attention.triton import plan
from pallas_kernels.ring import must_fold

ACCEPTED = 0.7  # of T
INPUT = 2  # bytes of an activation
ORDER = 4  # of a number in the ring's order


@dataclasses.dataclass(frozen=True)
class Steady:
    """What the cursors do on average.

    Attributes:
        accepted: tokens of a pass that are accepted.
        history: tokens of the ring that a pass reads.
        folds: share of passes that write the state.
    """

    accepted: float
    history: float
    folds: float


def ring_length(tokens: int) -> int:
    """Q for passes of T tokens."""
    return max(4 * tokens, 8)


@functools.cache
def steady_state(tokens: int, length: int, rows: int = 64, steps: int = 2000, seed: int = 0) -> Steady:
    """The average over the passes of `rows` requests that accept ACCEPTED of T tokens on average, one at least."""
    rng = np.random.default_rng(seed)
    chance = max(0.0, (ACCEPTED * tokens - 1) / max(tokens - 1, 1))
    counts, seen = np.zeros(rows, np.int64), []
    for step in range(steps):
        fold = must_fold(counts, tokens, tokens, length)
        accepted = 1 + rng.binomial(tokens - 1, chance, rows)
        if step >= steps // 10:  # all began with empty rings
            seen.append((accepted, counts, fold))
        counts = np.where(fold, 0, counts) + accepted
    return Steady(*(float(np.mean(column)) for column in zip(*seen, strict=True)))


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of one op in a step.

    Attributes:
        state: states, snapshots of them and ring entries, read and written.
        window: what any strategy reads and writes of the pass's own tokens.
        floor: the least that could be moved.
    """

    state: float
    window: float
    floor: float

    @property
    def moved(self) -> float:
        """All of them."""
        return self.state + self.window


def recurrence(model: Model, strategy: str, tokens: int, itemsize: int, tree: bool = False) -> Bytes:
    """The verify pass of one recurrent layer and the recurrent half of its commit.

    Args:
        model: which.
        strategy: "snapshot" or "replay".
        tokens: T.
        itemsize: bytes of a state's element.
        tree: whether the commit puts the accepted path first in the ring's order, once for all layers.
    """
    layer = model.recurrence
    S, r = layer.state_size * itemsize, layer.kept(INPUT)
    window = tokens * (r + layer.passing(INPUT))
    floor = S + tokens * (r + layer.passing(INPUT))
    if strategy == "snapshot":
        read, snapshots, commit = S, tokens * S, 2 * S
        return Bytes(read + snapshots + commit, window, floor)
    length = ring_length(tokens)
    steady = steady_state(tokens, length)
    kept = (steady.history + tokens) * (r + ORDER)  # each input lies where the order says
    permuted = (length + tokens) * ORDER / model.layers if tree else 0
    return Bytes((1 + steady.folds) * S + kept + permuted, window, floor)


def convolution(model: Model, tokens: int, batch: int) -> Bytes:
    """The convolution's pass and its half of the commit, the same whatever the strategy."""
    row, width = model.channels * INPUT, model.conv_width
    window, weights = (width - 1) * row, (width + 1) * row / batch
    recorded = tokens * row
    committed = window + min(width - 1, steady_state(tokens, ring_length(tokens)).accepted) * row + window
    through = 2 * tokens * row + weights  # inputs and outputs
    return Bytes(window + recorded + committed, through, 2 * window + through)


def commit(model: Model, tokens: int, itemsize: int) -> Bytes:
    """`state_commit` alone after snapshots: one state and one window from where they lie to where they belong."""
    S, row = model.recurrence.state_size * itemsize, model.channels * INPUT
    columns = model.conv_width - 1
    taken = min(columns, steady_state(tokens, ring_length(tokens)).accepted)
    return Bytes(2 * S + (2 * columns + taken) * row, 0, 2 * S + 2 * columns * row)


def attention(model: Model, tokens: int, batch: int, context: int, max_len: int) -> Bytes:
    """`decode_attention` of one layer over `context` committed positions."""
    shape, width = model.attention, model.attention.dtype(0).itemsize
    division = plan(
        (batch, tokens, shape.heads, shape.head_dim), (batch, max_len, shape.kv_heads, shape.head_dim), max_len, width,
        False,
    )  # fmt: skip
    cached = (context + tokens) * 2 * shape.kv_heads * shape.head_dim * width
    window = 2 * tokens * shape.heads * shape.head_dim * width
    chunks = -(-(context + tokens) // division.chunk)
    parts = 2 * 4 * tokens * shape.heads * (shape.head_dim + 2) * chunks if division.splits > 1 else 0
    return Bytes(cached + parts, window, cached + window)


def resident(model: Model, strategy: str, tokens: int, itemsize: int) -> float:
    """Bytes a row and layer occupies while it is verified, the pool's own state included."""
    S = model.recurrence.state_size * itemsize
    if strategy == "snapshot":
        return (tokens + 1) * S
    return S + ring_length(tokens) * (model.recurrence.kept(INPUT) + ORDER / model.layers)
