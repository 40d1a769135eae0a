"""Hypothesis strategies for index arrays: written slots are distinct, everything else may be anything."""

import numpy as np
from hypothesis import strategies as st

from tests.pallas_kernels.oracle import Sets

OUTSIDE = (-1, -2, -(2**31), 2**31 - 1)


@st.composite
def index_sets(draw, batch, slots, rows, steps, tracked):
    """Slots, steps and rows in and out of range; `2 * batch <= slots`."""

    def indices(inside, limit):
        skipped = draw(
            st.lists(st.sampled_from([None] * 8 + [*OUTSIDE, limit, limit + 1]), min_size=batch, max_size=batch)
        )
        return np.array([x if skip is None else skip for x, skip in zip(inside, skipped, strict=True)], np.int32)

    def anywhere(limit):
        return indices(draw(st.lists(st.integers(0, limit - 1), min_size=batch, max_size=batch)), limit)

    order = draw(st.permutations(range(slots)))
    sets = Sets(indices(order[:batch], slots), anywhere(steps), anywhere(rows))
    if tracked:
        sets = sets._replace(track_slots=indices(order[batch : 2 * batch], slots), track_steps=anywhere(steps))
    return sets


@st.composite
def trees(draw, batch, nodes):
    """`[B, T]` int32 parents: any earlier node, or -1 (a root anywhere ends the path there)."""
    rows = [[draw(st.integers(-1, t - 1)) for t in range(nodes)] for _ in range(batch)]
    return np.array(rows, np.int32).reshape(batch, nodes)
