"""What a token computes changes no token that does not descend from it: every op, form and implementation, to the bit.

Each row of a window has a column full of NaN, infinity, a signalling NaN or numbers that overflow; so has everything
that no row may read. What is compared with a run on finite numbers: the outputs and states of all columns that do not
descend from such a column, and every state that was committed before it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    causal_conv1d_update,
    decode_attention,
    gated_delta_chunk,
    gated_delta_update,
    selective_state_update,
    ssd_chunk_scan,
)
from pallas_kernels.ring import Ring
from tests.pallas_kernels.oracle import bits
from tests.pallas_kernels.runs import jitted

L, S, B, T, Q, LAYER = 2, 8, 5, 4, 9, 1
SLOTS = np.array([3, 6, -1, 0, 5], np.int32)
LIVE = SLOTS >= 0
PARENTS = np.array([[-1, 0, 0, 1], [-1, 0, 1, 0], [-1, 0, 1, 2], [-1, -1, 0, 1], [-1, 0, 0, 2]], np.int32)
STARTS, COUNTS = np.arange(S, dtype=np.int32), np.full(S, 1, np.int32)
CHAIN = np.tile(np.arange(-1, T - 1, dtype=np.int32), (B, 1))
COLUMN = np.array([2, 1, 0, 3, -1])  # the poisoned one of each row; the last row has none
KINDS = ("nan", "inf", "signalling", "huge")
RUNS = ("xla", "triton")


def poison(dtype, kind):
    """One number that is not finite, or that squares to one that is not."""
    match kind:
        case "nan":
            return np.array(np.nan, dtype)
        case "inf":
            return np.array(-np.inf, dtype)
        case "huge":
            return np.array(jnp.finfo(dtype).max, dtype)
    infinite = np.array(np.inf, dtype)
    return (infinite.view(f"u{infinite.itemsize}") + 1).view(dtype)


def descends(parents):
    """`[B, T]`, whether a column is the poisoned one or descends from it."""
    hit = np.zeros((B, T), bool)
    for b in range(B):
        for t in range(T):
            hit[b, t] = t == COLUMN[b] or (parents[b, t] >= 0 and hit[b, parents[b, t]])
    return hit


def spoiled_columns(leaves, turn):
    """The inputs `[B, T, ...]` with each row's column poisoned, by another kind in each row."""
    spoiled = {name: leaf.copy() for name, leaf in leaves.items()}
    for b in np.flatnonzero(COLUMN >= 0):
        for leaf in spoiled.values():
            leaf[b, COLUMN[b]] = poison(leaf.dtype, KINDS[(b + turn) % len(KINDS)])
    return spoiled


def spoiled_where(leaf, nobody_reads, turn):
    """An array with poison where nobody may read."""
    return np.where(nobody_reads.reshape(*nobody_reads.shape, *[1] * (leaf.ndim - nobody_reads.ndim)),
                    poison(leaf.dtype, KINDS[turn]), leaf)  # fmt: skip


def pool(rng, turn, *shape, dtype=np.float32):
    """A pool, and the same with poison in the other layer and in every slot that no row has."""
    clean = rng.normal(size=(L, S, *shape)).astype(dtype)
    idle = np.ones((L, S), bool)
    idle[LAYER, SLOTS[LIVE]] = False
    return clean, spoiled_where(clean, idle, turn)


def ring(rng, turn, **leaves):
    """A ring with one token of history in every slot, and the same with poison in every other entry."""
    order = rng.permuted(np.tile(np.arange(Q, dtype=np.int32), (S, 1)), axis=1)
    idle = np.ones((L, S, Q), bool)
    for slot in SLOTS[LIVE]:
        idle[LAYER, slot, order[slot, STARTS[slot] % Q]] = False
    clean = {name: draw(L, S, Q) for name, draw in leaves.items()}
    poisoned = {name: spoiled_where(leaf, idle, turn) for name, leaf in clean.items()}
    return Ring(clean, STARTS, COUNTS, order), Ring(poisoned, STARTS, COUNTS, order)


def check(clean, poisoned, untouched):
    """Equal bits of two results `[B, T, ...]` in some columns, which are finite."""
    clean, poisoned = np.asarray(clean)[untouched], np.asarray(poisoned)[untouched]
    assert np.isfinite(clean.astype(np.float32)).all()
    np.testing.assert_array_equal(bits(clean), bits(poisoned))


def check_slots(clean, poisoned, rows):
    """Equal bits of what a layer of two pools holds for some rows."""
    check(np.asarray(clean)[LAYER, SLOTS[rows]], np.asarray(poisoned)[LAYER, SLOTS[rows]], slice(None))


def ssm_arguments(rng):
    H, P, G, N = 2, 5, 1, 6

    def normal(*shape):
        return lambda *lead: rng.normal(size=(*lead, *shape)).astype(np.float32)

    def steps(*lead):
        return rng.uniform(0.1, 1, (*lead, H)).astype(np.float32)

    kept = {"x": normal(H, P), "dt": steps, "B": normal(G, N)}
    window = {name: draw(B, T) for name, draw in (kept | {"C": normal(G, N)}).items()}
    weights = {"A": -rng.uniform(0.1, 2, H).astype(np.float32), "D": rng.normal(size=H).astype(np.float32)}
    return (H, P, N), kept, window, weights


def delta_arguments(rng, per_channel):
    Hk, Hv, V, K = 1, 2, 5, 6

    def normal(*shape):
        return lambda *lead: rng.normal(size=(*lead, *shape)).astype(np.float32)

    def decay(*lead):
        return -rng.uniform(0.01, 2, (*lead, Hv, *((K,) if per_channel else ()))).astype(np.float32)

    def beta(*lead):
        return rng.uniform(0.1, 0.9, (*lead, Hv)).astype(np.float32)

    kept = {"k": normal(Hk, K), "v": normal(Hv, V), "g": decay, "beta": beta}
    window = {name: draw(B, T) for name, draw in (kept | {"q": normal(Hk, K)}).items()}
    return (Hv, V, K), kept, window, {"num_tokens": np.full(B, T, np.int32)}


@functools.cache
def compiled(op, run, **static):
    return jitted(op, run, donate=(), **static)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("keep", ["snapshots of a tree", "ring of a chain"])
@pytest.mark.parametrize("form", ["step", "chunk"])
@pytest.mark.parametrize("op", ["ssm", "gdn", "kda"])
def test_a_recurrence(op, form, keep, run):
    tree = keep.endswith("tree")
    update: Any = selective_state_update if op == "ssm" else gated_delta_update
    call = compiled(update, run, layer=LAYER, form=form)
    parents = PARENTS if tree else CHAIN
    for turn in range(len(KINDS)):
        rng = np.random.default_rng(turn)
        state, kept, window, others = ssm_arguments(rng) if op == "ssm" else delta_arguments(rng, op == "kda")
        states, windows = pool(rng, turn, *state), (window, spoiled_columns(window, turn))
        given = [others | {"state": s, "slots": SLOTS} | w for s, w in zip(states, windows, strict=True)]
        if tree:
            snapshots = np.zeros((L, B, T, *state), np.float32)
            given = [one | {"snapshots": snapshots, "parents": PARENTS} for one in given]
        else:
            rings = ring(rng, turn, **kept)
            given = [one | {"ring": r, "fold": np.ones(B, bool)} for one, r in zip(given, rings, strict=True)]
        clean, poisoned = (jax.device_get(call(**one)) for one in given)
        untouched = ~descends(parents)
        check(clean[0], poisoned[0], untouched & LIVE[:, None])
        if tree:
            check(clean.snapshots[LAYER], poisoned.snapshots[LAYER], untouched & LIVE[:, None])
        else:
            check_slots(clean.state, poisoned.state, LIVE)  # the history alone


@pytest.mark.parametrize("op", ["ssm", "gdn", "kda"])
def test_a_prompt(op):
    for turn in range(len(KINDS)):
        rng = np.random.default_rng(turn)
        state, _, window, others = ssm_arguments(rng) if op == "ssm" else delta_arguments(rng, op == "kda")
        call = compiled(ssd_chunk_scan if op == "ssm" else gated_delta_chunk, "xla", layer=LAYER, chunk_size=3)
        results = []
        for states, tokens in zip(pool(rng, turn, *state), (window, spoiled_columns(window, turn)), strict=True):
            results.append(jax.device_get(call(state=states, slots=SLOTS, **tokens, **others)))
        check(results[0][0], results[1][0], ~descends(CHAIN) & LIVE[:, None])
        check_slots(results[0][1], results[1][1], LIVE & (COLUMN < 0))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("form", ["step", "chunk"])
def test_a_token_without_a_time_step(form, run):
    """dt = 0 says that there is no token: the state is that of the tokens there are, whatever x, B and C hold."""
    call = compiled(selective_state_update, run, layer=LAYER, form=form)
    for turn in range(len(KINDS)):
        rng = np.random.default_rng(turn)
        state, _, window, others = ssm_arguments(rng)
        window["dt"][:, -1] = 0
        spoiled = window | {name: window[name].copy() for name in ("x", "B", "C")}
        for name in ("x", "B", "C"):
            spoiled[name][:, -1] = poison(np.float32, KINDS[turn])
        given = others | {"state": pool(rng, turn, *state)[0], "slots": SLOTS}
        clean, poisoned = (jax.device_get(call(**given, **tokens)) for tokens in (window, spoiled))
        check_slots(clean.state, poisoned.state, LIVE)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("tree", [False, True])
def test_a_convolution(tree, run):
    C, W = 7, 4
    call = compiled(causal_conv1d_update, run, layer=LAYER, activation="silu")
    for turn in range(len(KINDS)):
        rng = np.random.default_rng(turn)
        x, record = rng.normal(size=(B, T, C)).astype(np.float32), np.zeros((L, B, T, C), np.float32)
        given: dict[str, Any] = {"weight": rng.normal(size=(W, C)).astype(np.float32), "bias": np.ones(C, np.float32)}
        given |= {"conv_inputs": record, "parents": PARENTS} if tree else {"num_tokens": np.full(B, 1, np.int32)}
        states, inputs = pool(rng, turn, W - 1, C), (x, spoiled_columns({"x": x}, turn)["x"])
        clean, poisoned = (
            jax.device_get(call(x=one, conv_state=state, slots=SLOTS, **given))
            for one, state in zip(inputs, states, strict=True)
        )
        untouched = ~descends(PARENTS if tree else CHAIN)
        check(clean.y, poisoned.y, untouched & LIVE[:, None])
        if tree:
            check(clean.conv_inputs[LAYER], poisoned.conv_inputs[LAYER], untouched)
        else:  # after one token
            check_slots(clean.conv_state, poisoned.conv_state, LIVE & (COLUMN != 0))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("tree", [False, True])
def test_attention(tree, run, dtype):
    M, heads, size = 40, 2, 5
    lengths = np.array([9, 0, 3, M - T, 20], np.int32)
    parents = PARENTS if tree else CHAIN
    call = compiled(decode_attention, run, scale=0.4, block=16)
    options: dict[str, Any] = {}
    if tree:
        options["ancestors"] = np.zeros((B, T, T), bool)
        for b, t in np.ndindex(B, T):
            node = t
            while node >= 0:
                options["ancestors"][b, t, node], node = True, parents[b, node]
    for turn in range(len(KINDS)):
        rng = np.random.default_rng(turn)
        query = rng.normal(size=(B, T, 2 * heads, size)).astype(dtype)
        buffers = {name: rng.normal(size=(S, M, heads, size)).astype(dtype) for name in ("keys", "values")}
        idle = np.ones((S, M), bool)
        for slot, length in zip(SLOTS[LIVE], lengths[LIVE], strict=True):
            idle[slot, : length + T] = False
        spoiled = {name: spoiled_where(leaf, idle, turn) for name, leaf in buffers.items()}
        queries = spoiled_columns({"query": query}, turn)["query"]
        for b in np.flatnonzero(LIVE & (COLUMN >= 0)):
            for leaf in spoiled.values():
                leaf[SLOTS[b], lengths[b] + COLUMN[b]] = queries[b, COLUMN[b], 0, 0]
        clean = call(query=query, **buffers, slots=SLOTS, lengths=lengths, **options)
        poisoned = call(query=queries, **spoiled, slots=SLOTS, lengths=lengths, **options)
        check(clean, poisoned, ~descends(parents) & LIVE[:, None])
        own = np.asarray(poisoned)[LIVE & (COLUMN >= 0)][np.arange(3), COLUMN[LIVE & (COLUMN >= 0)]]
        assert not np.isfinite(own.astype(np.float32)).all()  # and the column itself does not look well
