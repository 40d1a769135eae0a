"""Random draft trees, and the paths that lead to their nodes."""

import numpy as np


def random_parents(rng, rows, nodes):
    """`[rows, nodes]` parents of trees with one root each."""
    parents = [np.full(rows, -1), *(rng.integers(0, node, rows) for node in range(1, nodes))]
    return np.stack(parents, axis=1).astype(np.int32)


def paths(parents, last):
    """`[rows, nodes]` the nodes from the root to `last[row]`, then -1; of a row without such a node -1."""
    path = np.full(parents.shape, -1, np.int32)
    for row, node in enumerate(last):
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = parents[row, node]
        path[row, : len(nodes)] = nodes[::-1]
    return path
