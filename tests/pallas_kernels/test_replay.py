"""Replay from a ring, snapshots, and decoding token by token: the same bits, whatever is accepted and when.

Windows are chains and trees in turn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold_history, selective_state_update
from pallas_kernels.ring import Ring, accept_path, extend, must_fold
from tests.pallas_kernels.ssm import same_bits
from tests.pallas_kernels.trees import paths, random_parents

S, H, P, N, G = 6, 2, 3, 5, 1
B, Q, WINDOW = 4, 9, 4
LAYER, STEPS = 1, 200
WEIGHTS = {"A": np.array([-0.4, -1.7], np.float32), "D": np.array([0.3, -1.1], np.float32)}

# What is compared to the bit is compiled as it would be for a user; everything else in less time.
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(function, form="step"):
    return jax.jit(functools.partial(function, form=form), compiler_options=None if form == "step" else QUICKLY)


def verify(state, inputs, slots, parents=None, *, form, **kept):
    A, D = (jnp.asarray(WEIGHTS[name]) for name in "AD")
    x, dt, b, c = inputs
    return selective_state_update(
        state, x, dt, A, b, c, D, layer=LAYER, slots=slots, parents=parents, form=form, **kept
    )  # fmt: skip


@functools.partial(jax.jit, compiler_options=QUICKLY)
def accept(ring, slots, fold, accepted, path=None):
    return extend(ring if path is None else accept_path(ring, slots, path), slots, fold, accepted)


def materialize(state, ring, slots, *, form):
    return fold_history(state, ring, jnp.asarray(WEIGHTS["A"]), layer=LAYER, slots=slots, form=form)


class Requests:
    """Rows that come and go, and the three ways of bringing their states forward, on pools of their own."""

    def __init__(self, dtype, form):
        self.rng, self.dtype, self.form = np.random.default_rng(7), dtype, form
        poison = np.full((2, S, H, P, N), np.nan).astype(jnp.dtype(dtype))
        self.decoded, self.snapshot, self.replayed = poison.copy(), poison.copy(), poison.copy()
        kept = {
            "x": np.full((2, S, Q, H, P), np.nan).astype(jnp.dtype(dtype)),
            "dt": np.full((2, S, Q, H), np.nan, np.float32),
            "B": np.full((2, S, Q, G, N), np.nan).astype(jnp.dtype(dtype)),
        }
        order = self.rng.permuted(np.tile(np.arange(Q, dtype=np.int32), (S, 1)), axis=1)
        self.ring = Ring(kept, np.zeros(S, np.int32), np.zeros(S, np.int32), order)
        self.slots = np.arange(B, dtype=np.int32)
        for slot in self.slots:
            self.admit(slot)

    def admit(self, slot):
        """A new owner of the slot: a state of its own, no history."""
        h = self.rng.normal(size=(H, P, N)).astype(self.decoded.dtype)
        for pool in (self.decoded, self.snapshot, self.replayed):
            pool[LAYER, slot] = h
        self.ring.starts[slot], self.ring.counts[slot] = self.rng.integers(Q), 0

    def window(self, tokens, real):
        """Inputs of one pass, NaN behind the real tokens, where dt is 0."""
        shapes = {"x": (B, tokens, H, P), "B": (B, tokens, G, N), "C": (B, tokens, G, N)}
        drawn = {name: np.asarray(self.rng.normal(size=shape)) for name, shape in shapes.items()}
        behind = np.arange(tokens) >= real[:, None]
        if self.form == "step":  # the chunked form multiplies them by 0
            for leaf in drawn.values():
                leaf[behind] = np.nan
        x, b, c = (jnp.asarray(leaf, self.dtype) for leaf in drawn.values())
        dt = self.rng.uniform(0.02, 0.9, (B, tokens, H)).astype(np.float32)
        dt[behind] = 0
        return x, jnp.asarray(dt), b, c

    def decode(self, inputs, path):
        """Plain decoding of every accepted token; outputs `[B, T, H, P]` by depth."""
        outputs = np.zeros(inputs[0].shape, np.float32)
        for t in range((path >= 0).sum(axis=1).max(initial=0)):
            slots = np.where(path[:, t] >= 0, self.slots, -1).astype(np.int32)
            tokens = [leaf[np.arange(B), np.maximum(path[:, t], 0)][:, None] for leaf in inputs]
            result = compiled(verify)(self.decoded, tokens, slots)
            self.decoded, outputs[:, t] = np.array(result.state), np.asarray(result.y[:, 0], np.float32)
        return outputs

    def by_snapshots(self, inputs, parents, path):
        snapshots = np.full((2, *inputs[0].shape[:2], H, P, N), np.nan).astype(self.snapshot.dtype)
        result = compiled(verify, self.form)(self.snapshot, inputs, self.slots, parents, snapshots=snapshots)
        last = path.max(axis=1)
        for row in np.flatnonzero(last >= 0):
            self.snapshot[LAYER, self.slots[row]] = result.snapshots[LAYER, row, last[row]]
        return np.asarray(result.y, np.float32)

    def by_replay(self, inputs, parents, path):
        live = self.slots >= 0
        counts = np.where(live, self.ring.counts[np.maximum(self.slots, 0)], 0)
        fold = np.asarray(must_fold(counts, inputs[0].shape[1], WINDOW, Q))
        result = compiled(verify, self.form)(self.replayed, inputs, self.slots, parents, ring=self.ring, fold=fold)
        accepted = (path >= 0).sum(axis=1).astype(np.int32)
        ring = accept(result.ring, self.slots, fold, accepted, None if parents is None else path)
        self.replayed, self.ring = np.array(result.state), jax.tree.map(np.array, ring)
        return np.asarray(result.y, np.float32), fold & live

    def materialized(self):
        """The replayed pool with every live slot's history folded in."""
        return np.array(compiled(materialize, self.form)(self.replayed, self.ring, np.arange(B, dtype=np.int32)))


@pytest.mark.parametrize(("dtype", "form", "widths", "trees"), [
    ("float32", "step", (1, WINDOW), 0.5), ("bfloat16", "step", (WINDOW,), 1), ("float32", "chunk", (WINDOW,), 0.5),
])  # fmt: skip
def test_replay_snapshots_and_decoding_agree(dtype, form, widths, trees):
    """For 200 steps of any width, with zero drafts, trees, padding rows, folds, and slots that change hands."""
    requests, seen = Requests(dtype, form), set()
    rng = np.random.default_rng(3)

    def same(actual, expected):
        if form == "step":
            return same_bits(actual, expected)
        return np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)

    for step in range(STEPS):
        tokens = int(rng.choice(widths))
        padding = rng.random(B) < 0.15
        real = np.where(rng.random(B) < 0.25, 1, rng.integers(1, tokens + 1, B))
        is_tree = tokens == WINDOW and rng.random() < trees
        parents = random_parents(rng, B, WINDOW) if is_tree else np.tile(np.arange(tokens) - 1, (B, 1))
        path = paths(parents, np.where(padding, -1, rng.integers(0, real)))
        requests.slots = np.where(padding, -1, rng.permutation(B)).astype(np.int32)
        inputs = requests.window(tokens, real)
        outputs = requests.decode(inputs, path)
        snapshot = requests.by_snapshots(inputs, parents if tokens == WINDOW else None, path)  # a chain is a tree too
        replayed, folded = requests.by_replay(inputs, parents if is_tree else None, path)
        for row, nodes in enumerate(path):
            nodes = nodes[nodes >= 0]
            same(snapshot[row, nodes], outputs[row, : nodes.size])
            same(replayed[row, nodes], outputs[row, : nodes.size])
            seen |= {("moved", bool((nodes != np.arange(nodes.size)).any()))}
        same(requests.snapshot[LAYER, :B], requests.decoded[LAYER, :B])
        seen |= {("folds", count) for count in folded.sum(keepdims=True)} | {("drafts", n - 1) for n in real}
        if step % 10 == 9:
            same(requests.materialized()[LAYER, :B], requests.decoded[LAYER, :B])
            requests.admit(rng.integers(B))
    assert np.isnan(requests.replayed[1 - LAYER].astype(np.float32)).all(), "another layer was touched"
    assert np.isnan(requests.replayed[LAYER, B:].astype(np.float32)).all(), "nobody's slot was touched"
    assert {("folds", 0), ("folds", 1), ("drafts", 0), ("drafts", max(widths) - 1), ("moved", True)} <= seen
    assert (np.sort(requests.ring.order, axis=1) == np.arange(Q)).all()
