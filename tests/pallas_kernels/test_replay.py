"""Replay from a ring, snapshots, and decoding token by token: the same bits, whatever is accepted and when."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold_history, selective_state_update
from pallas_kernels.ring import Ring, must_fold
from tests.pallas_kernels.ssm import same_bits

S, H, P, N, G = 6, 2, 3, 5, 1
B, Q, WINDOW = 4, 9, 4
LAYER, STEPS = 1, 200
WEIGHTS = {"A": np.array([-0.4, -1.7], np.float32), "D": np.array([0.3, -1.1], np.float32)}


@functools.partial(jax.jit, static_argnames="form")
def verify(state, inputs, slots, snapshots=None, ring=None, fold=None, form="step"):
    A, D = (jnp.asarray(WEIGHTS[name]) for name in "AD")
    x, dt, b, c = inputs
    return selective_state_update(
        state, x, dt, A, b, c, D, layer=LAYER, slots=slots, snapshots=snapshots, ring=ring, fold=fold, form=form
    )


@functools.partial(jax.jit, static_argnames="form")
def materialize(state, ring, slots, form="step"):
    return fold_history(state, ring, jnp.asarray(WEIGHTS["A"]), layer=LAYER, slots=slots, form=form)


class Requests:
    """Rows that come and go, and the three ways of bringing their states forward, on pools of their own."""

    def __init__(self, dtype, form):
        self.rng, self.dtype, self.form = np.random.default_rng(7), dtype, form
        poison = np.full((2, S, H, P, N), np.nan).astype(jnp.dtype(dtype))
        self.decoded, self.snapshot, self.replayed = poison.copy(), poison.copy(), poison.copy()
        self.kept = {
            "x": np.full((2, S, Q, H, P), np.nan).astype(jnp.dtype(dtype)),
            "dt": np.full((2, S, Q, H), np.nan, np.float32),
            "B": np.full((2, S, Q, G, N), np.nan).astype(jnp.dtype(dtype)),
        }
        self.starts, self.counts = np.zeros(S, np.int32), np.zeros(S, np.int32)
        self.slots = np.arange(B, dtype=np.int32)
        for slot in self.slots:
            self.admit(slot)

    def admit(self, slot):
        """A new owner of the slot: a state of its own, no history."""
        h = self.rng.normal(size=(H, P, N)).astype(self.decoded.dtype)
        for pool in (self.decoded, self.snapshot, self.replayed):
            pool[LAYER, slot] = h
        self.starts[slot], self.counts[slot] = self.rng.integers(Q), 0

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

    def decode(self, inputs, accepted):
        """Plain decoding of every accepted token; its outputs."""
        outputs = np.zeros(inputs[0].shape, np.float32)
        for t in range(accepted.max(initial=0)):
            slots = np.where(t < accepted, self.slots, -1).astype(np.int32)
            result = verify(self.decoded, [leaf[:, t : t + 1] for leaf in inputs], slots)
            self.decoded, outputs[:, t] = np.array(result.state), np.asarray(result.y[:, 0], np.float32)
        return outputs

    def by_snapshots(self, inputs, accepted):
        snapshots = np.full((2, *inputs[0].shape[:2], H, P, N), np.nan).astype(self.snapshot.dtype)
        result = verify(self.snapshot, inputs, self.slots, snapshots=snapshots, form=self.form)
        for row in np.flatnonzero(accepted):
            self.snapshot[LAYER, self.slots[row]] = result.snapshots[LAYER, row, accepted[row] - 1]
        return np.asarray(result.y, np.float32)

    def by_replay(self, inputs, accepted):
        live = self.slots >= 0
        counts = np.where(live, self.counts[np.maximum(self.slots, 0)], 0)
        fold = np.asarray(must_fold(counts, inputs[0].shape[1], WINDOW, Q))
        ring = Ring(self.kept, self.starts, self.counts)
        result = verify(self.replayed, inputs, self.slots, ring=ring, fold=fold, form=self.form)
        self.replayed, self.kept = np.array(result.state), jax.tree.map(np.array, result.ring.inputs)
        for row in np.flatnonzero(live):
            slot = self.slots[row]
            if fold[row]:
                self.starts[slot], self.counts[slot] = (self.starts[slot] + self.counts[slot]) % Q, 0
            self.counts[slot] += accepted[row]
        return np.asarray(result.y, np.float32), fold & live

    def materialized(self):
        """The replayed pool with every live slot's history folded in."""
        ring = Ring(self.kept, self.starts, self.counts)
        return np.array(materialize(self.replayed, ring, np.arange(B, dtype=np.int32), form=self.form))


@pytest.mark.parametrize(("dtype", "form", "widths"), [
    ("float32", "step", (1, 3, WINDOW)), ("bfloat16", "step", (WINDOW,)), ("float32", "chunk", (WINDOW,)),
])  # fmt: skip
def test_replay_snapshots_and_decoding_agree(dtype, form, widths):
    """For 200 steps of any width, with zero drafts, padding rows, folds, and slots that change hands."""
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
        accepted = np.where(padding, 0, rng.integers(1, real + 1)).astype(np.int32)
        requests.slots = np.where(padding, -1, rng.permutation(B)).astype(np.int32)
        inputs = requests.window(tokens, real)
        outputs = requests.decode(inputs, accepted)
        snapshot = requests.by_snapshots(inputs, accepted)
        replayed, folded = requests.by_replay(inputs, accepted)
        for row, count in enumerate(accepted):
            same(snapshot[row, :count], outputs[row, :count])
            same(replayed[row, :count], outputs[row, :count])
        same(requests.snapshot[LAYER, :B], requests.decoded[LAYER, :B])
        seen |= {("folds", count) for count in folded.sum(keepdims=True)} | {("drafts", n - 1) for n in real}
        if step % 10 == 9:
            same(requests.materialized()[LAYER, :B], requests.decoded[LAYER, :B])
            requests.admit(rng.integers(B))
    assert np.isnan(requests.replayed[1 - LAYER].astype(np.float32)).all(), "another layer was touched"
    assert np.isnan(requests.replayed[LAYER, B:].astype(np.float32)).all(), "nobody's slot was touched"
    assert {("folds", 0), ("folds", 1), ("drafts", 0), ("drafts", max(widths) - 1)} <= seen
