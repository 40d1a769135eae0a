"""Decoding token by token, verifying with snapshots and replaying a ring leave the same bits, whatever is accepted.

Windows are chains and trees in turn.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gated_delta_update import fold_history, gated_delta_update
from pallas_kernels.ring import Ring, accept_path, extend, must_fold
from tests.pallas_kernels import delta_rule, oracle
from tests.pallas_kernels.delta_rule import KEPT, LAYER, Hv, K, L, Q, S, T, V
from tests.pallas_kernels.trees import paths, random_parents

ROWS = 3
# Numbers, decays per channel, steps, and the share of trees among windows of T.
KINDS = {"float32": (np.float32, False, 200, 0.5), "bfloat16-per-channel": (ml_dtypes.bfloat16, True, 60, 1)}


@functools.cache
def compiled():
    def update(state, inputs, slots, num_tokens, kept):
        return gated_delta_update(state, **inputs, layer=LAYER, slots=slots, num_tokens=num_tokens, **kept)

    def replay(state, inputs, slots, num_tokens, ring, parents, path):
        fold = must_fold(ring.counts[slots], inputs["k"].shape[1], T, Q)
        result = update(state, inputs, slots, num_tokens, {"ring": ring, "fold": fold, "parents": parents})
        ring = result.ring if parents is None else accept_path(result.ring, slots, path)
        return result.y, result.state, extend(ring, slots, fold, jnp.sum(path >= 0, axis=1, dtype=jnp.int32)), fold

    return jax.jit(update), jax.jit(replay), jax.jit(functools.partial(fold_history, layer=LAYER))


class Sequential:
    """Accepted tokens decoded one at a time: a pool that advances."""

    def __init__(self, state):
        self.state = jnp.array(state)

    def admit(self, slot):
        self.state = self.state.at[:, slot].set(0)

    def step(self, inputs, slots, num_tokens, path, parents=None):
        """Outputs by depth: of the accepted path's nodes, in its order."""
        outputs = []
        for nodes in path.T:
            token = {name: leaf[np.arange(ROWS), np.maximum(nodes, 0)][:, None] for name, leaf in inputs.items()}
            result = compiled()[0](self.state, token, slots, (nodes >= 0).astype(np.int32), {})
            self.state = result.state
            outputs.append(result.y)
        return np.concatenate(outputs, axis=1)

    def states(self):
        return self.state


class Snapshot(Sequential):
    """A verify pass that writes every state, and a commit of the accepted one."""

    def step(self, inputs, slots, num_tokens, path, parents=None):
        empty = jnp.full((L, *inputs["v"].shape[:2], Hv, V, K), jnp.nan, self.state.dtype)
        result = compiled()[0](self.state, inputs, slots, num_tokens, {"snapshots": empty, "parents": parents})
        assert (oracle.bits(result.state) == oracle.bits(self.state)).all()
        self.state = self.state.at[:, slots].set(result.snapshots[:, np.arange(ROWS), path.max(axis=1)])
        self.state = self.state.at[1 - LAYER].set(0)
        return by_depth(result.y, path)


class Replay(Sequential):
    """A verify pass from checkpoints and a ring of inputs, and a commit that moves cursors and orders a path."""

    folds = 0

    def __init__(self, state, inputs):
        super().__init__(state)
        rings = {name: jnp.full((L, S, Q, *inputs[name].shape[2:]), jnp.nan, inputs[name].dtype) for name in KEPT}
        order = delta_rule.random_order(np.random.default_rng(1))
        self.ring = Ring(rings, jnp.arange(S, dtype=jnp.int32) % Q, jnp.zeros(S, jnp.int32), jnp.array(order))

    def admit(self, slot):
        super().admit(slot)
        self.ring = self.ring._replace(counts=self.ring.counts.at[slot].set(0))

    def step(self, inputs, slots, num_tokens, path, parents=None):
        given = inputs, slots, num_tokens, self.ring, parents, path
        o, self.state, self.ring, fold = compiled()[1](self.state, *given)
        self.folds += int(fold.sum())
        return by_depth(o, path)

    def states(self):
        return compiled()[2](self.state, self.ring, slots=jnp.arange(S, dtype=jnp.int32))


def by_depth(o, path):
    return np.asarray(o)[np.arange(ROWS)[:, None], np.maximum(path, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_sequential_snapshot_and_replay_have_the_same_bits(kind):
    dtype, per_channel, steps, trees = KINDS[kind]
    rng = np.random.default_rng(0)
    state = np.zeros((L, S, Hv, V, K), dtype)
    ways = [Sequential(state), Snapshot(state), Replay(state, delta_rule.random_inputs(rng, 1, 1, dtype, per_channel))]
    slots = np.array([4, 1, 6], np.int32)
    lengths, compared, moved = set(), 0, 0
    for _ in range(steps):
        if rng.random() < 0.1:  # a row's request ends, and another takes over its slot or a free one
            row = rng.integers(ROWS)
            slots[row] = rng.choice([slots[row], *np.setdiff1d(np.arange(S), slots)])
            for way in ways:
                way.admit(int(slots[row]))
        window = int(rng.choice([1, T], p=[0.3, 0.7]))
        num_tokens = rng.integers(1, window + 1, ROWS).astype(np.int32)
        is_tree = window == T and rng.random() < trees
        parents = random_parents(rng, ROWS, T) if is_tree else np.tile(delta_rule.chain(window), (ROWS, 1))
        path = paths(parents, rng.integers(num_tokens // 2 if is_tree else 0, num_tokens))
        inputs = delta_rule.random_inputs(rng, ROWS, window, dtype, per_channel)
        rows = jnp.array(slots), num_tokens
        # A chain is a tree too: snapshots need no program for it.
        outputs = [
            ways[0].step(inputs, *rows, path),
            ways[1].step(inputs, *rows, path, parents if window == T else None),
            ways[2].step(inputs, *rows, path, parents if is_tree else None),
        ]
        seen = path >= 0
        moved += int((seen & (path != np.arange(window))).any())
        for other in outputs[1:]:
            np.testing.assert_array_equal(oracle.bits(other[seen]), oracle.bits(outputs[0][seen]))
        lengths |= {(window, int(n)) for n in num_tokens}
        compared += int(seen.sum())
        states = [oracle.bits(np.asarray(way.states())[LAYER][slots]) for way in ways]
        for other in states[1:]:
            np.testing.assert_array_equal(other, states[0])
    assert lengths == {(1, 1), *((T, n) for n in range(1, T + 1))}
    assert compared > 4 * steps
    assert ways[2].folds > steps / 4
    assert moved > steps / 10
    assert np.isfinite(np.asarray(ways[0].states(), np.float32)).all()
