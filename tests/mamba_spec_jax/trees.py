"""Draft trees as plain Python sees them, and a hypothesis strategy that draws them."""

import numpy as np
from hypothesis import strategies as st


def path(parents, node) -> list[int]:
    """Node ids from the root to `node`."""
    nodes = [int(node)]
    while parents[nodes[0]] >= 0:
        nodes.insert(0, int(parents[nodes[0]]))
    return nodes


def trees(rows: int, nodes: int):
    """`[rows, nodes]` int32 parents, another tree in each row: deep, wide or in between."""
    row = st.tuples(*(st.integers(0, t - 1) for t in range(1, nodes)))
    return st.tuples(*[row] * rows).map(lambda drawn: np.array([(-1, *parents) for parents in drawn], np.int32))


def chains(rows: int, nodes: int) -> np.ndarray:
    return np.tile(np.arange(-1, nodes - 1, dtype=np.int32), (rows, 1))
