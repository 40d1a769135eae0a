"""gated_delta_update against float64: outputs, states, and every byte that is to stay, in every mode."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gated_delta_update import fold_history, gated_delta_update
from tests.pallas_kernels import delta_rule, oracle
from tests.pallas_kernels.delta_rule import KEPT, LAYER, B, Hv, K, L, Q, S, T, V, chain, close
from tests.pallas_kernels.runs import RUNS

SCALE = K**-0.5
KINDS = {
    "float32": (np.float32, False),
    "float32-per-channel": (np.float32, True),
    "bfloat16-per-channel": (ml_dtypes.bfloat16, True),
    "float16": (np.float16, False),
}
COUNTS, STARTS = np.array([5, 1, 1, 3, 0, 4, 0], np.int32), np.array([6, 0, 3, 8, 2, 4, 1], np.int32)
FOLD = np.array([True, True, True, False, True])

# A ring reads, rounds and writes states, so it meets every kind; other modes share that, and meet some.
STEPS = [
    (run, "step", tree, kind)
    for run in ("xla", "triton")
    for tree in (False, True)
    for kind in ("float32", "bfloat16-per-channel", "float16")
]
CHUNKS = [
    ("xla", "chunk", False, "float32"),
    ("xla", "chunk", True, "float32-per-channel"),
    ("triton", "chunk", False, "float32"),
    ("triton", "chunk", True, "float32-per-channel"),
]
SOME = [
    ("xla", "step", False, "float32"),
    ("xla", "step", True, "bfloat16-per-channel"),
    ("triton", "step", False, "float16"),
    ("triton", "step", True, "float32-per-channel"),
]


def every(cases):
    """A test's parameters: the implementation, the form, whether the window is a tree, and the kind of numbers."""
    names = [f"{run}-{form}-{'tree' if tree else 'chain'}-{kind}" for run, form, tree, kind in cases]
    return pytest.mark.parametrize(("run", "form", "tree", "kind"), cases, ids=names)


# The machine code of programs this small takes longer to optimise than to run.
QUICKLY = {"xla_backend_optimization_level": 0}


@functools.cache
def compiled(run, form, disable_state_update=False):
    def call(state, inputs, rows, kept):
        return gated_delta_update(
            state,
            **inputs,
            layer=LAYER,
            **rows,
            **kept,
            form=form,
            disable_state_update=disable_state_update,
            **RUNS[run],
        )

    return jax.jit(call, compiler_options=QUICKLY)


def run_pass(given, run, form, tree, kept=None, **options):
    rows = {"slots": given.slots, "num_tokens": given.num_tokens} | ({"parents": given.parents} if tree else {})
    arrays = delta_rule.on_device((given.state, given.inputs, rows, kept or {}))
    return jax.tree.map(np.asarray, compiled(run, form, **options)(*arrays))


def expected(given, b, start, form, tree):
    """What row b's window gives from a start: outputs and states, rounded token by token in the step form."""
    n = given.num_tokens[b]
    inputs = {name: leaf[b, :n] for name, leaf in given.inputs.items()}
    parents = given.parents[b, :n] if tree else chain(n)
    return delta_rule.along(start, inputs, parents, SCALE, given.state.dtype if form == "step" else None)


def check_outputs(given, o, starts, form, tree):
    """starts: the state before each row's window, by slot."""
    dtype, seen = given.state.dtype, np.zeros((B, T), bool)
    for b, slot, n in given.rows():
        close(o[b, :n], expected(given, b, starts[slot], form, tree)[0].reshape(n, Hv, V), dtype)
        seen[b, :n] = True
    assert seen.sum() == 6
    np.testing.assert_array_equal(o[~seen], np.zeros_like(o[~seen]))


def same_bits(actual, expected):
    np.testing.assert_array_equal(oracle.bits(actual), oracle.bits(expected))


@every([case for case in SOME + CHUNKS if not case[2]] + [("triton", "step", False, "bfloat16-per-channel")])
def test_decoding_leaves_the_state_after_each_rows_tokens(run, form, tree, kind):
    given = delta_rule.random_pass(np.random.default_rng(0), *KINDS[kind])
    result = run_pass(given, run, form, tree)
    check_outputs(given, result.y, given.state[LAYER], form, tree)
    left = given.state.copy()
    for b, slot, n in given.rows():
        if n:
            states = expected(given, b, given.state[LAYER, slot], form, tree)[1]
            close(result.state[LAYER, slot], states[-1], given.state.dtype)
            left[LAYER, slot] = result.state[LAYER, slot]
    same_bits(result.state, left)
    assert result.snapshots is None
    assert result.ring is None


@every([*SOME, *CHUNKS, ("xla", "chunk", True, "bfloat16-per-channel")])
def test_snapshots_are_the_states_after_every_token(run, form, tree, kind):
    given = delta_rule.random_pass(np.random.default_rng(1), *KINDS[kind])
    before = oracle.random_values(np.random.default_rng(2), (L, B, T, Hv, V, K), given.state.dtype)
    result = run_pass(given, run, form, tree, {"snapshots": before})
    check_outputs(given, result.y, given.state[LAYER], form, tree)
    same_bits(result.state, given.state)
    same_bits(result.snapshots[0], before[0])
    for b, slot, n in given.rows():
        states = expected(given, b, given.state[LAYER, slot], form, tree)[1]
        close(result.snapshots[LAYER, b, :n], states.reshape(n, Hv, V, K), given.state.dtype)


@every(STEPS + CHUNKS)
def test_a_ring_is_replayed_extended_and_folded(run, form, tree, kind):
    rng = np.random.default_rng(3)
    given = delta_rule.random_pass(rng, *KINDS[kind])
    ring = delta_rule.random_ring(rng, given, COUNTS, STARTS)
    result = run_pass(given, run, form, tree, {"ring": ring, "fold": FOLD})
    starts = after_history(given, ring, COUNTS, form)
    check_outputs(given, result.y, starts, form, tree)

    left = given.state.copy()
    for b, slot, _ in given.rows():
        if FOLD[b]:
            close(result.state[LAYER, slot], starts[slot], given.state.dtype)
            left[LAYER, slot] = result.state[LAYER, slot]
    same_bits(result.state, left)

    kept = jax.tree.map(np.copy, ring.inputs)
    for b, slot, n in given.rows():
        # Behind a row's tokens there may be anything up to the window's end, and the rest stays.
        behind = ring.order[slot, (STARTS[slot] + COUNTS[slot] + np.arange(T)) % Q]
        for name in KEPT:
            kept[name][LAYER, slot, behind[:n]] = given.inputs[name][b, :n]
            kept[name][LAYER, slot, behind[n:]] = result.ring.inputs[name][LAYER, slot, behind[n:]]
    jax.tree.map(same_bits, result.ring, ring._replace(inputs=kept))


def after_history(given, ring, counts, form):
    """The state of each slot after the first `counts` inputs of its ring."""
    starts = given.state[LAYER].astype(np.float64)
    for _, slot, _ in given.rows():
        at = ring.order[slot, (STARTS[slot] + np.arange(counts[slot])) % Q]
        history = {name: ring.inputs[name][LAYER, slot, at] for name in KEPT}
        states = delta_rule.along(
            starts[slot], history | {"q": history["k"]}, chain(counts[slot]), 1, given.state.dtype
        )[1]
        starts[slot] = states[-1] if counts[slot] else starts[slot]
    return starts


@pytest.mark.parametrize("run", ["xla", "triton"])
def test_without_a_state_update_the_pool_stays(run):
    given = delta_rule.random_pass(np.random.default_rng(4), np.float32, True)
    result = run_pass(given, run, "step", tree=False, disable_state_update=True)
    check_outputs(given, result.y, given.state[LAYER], "step", tree=False)
    same_bits(result.state, given.state)


@pytest.mark.parametrize(("run", "form"), [("xla", "step"), ("xla", "chunk"), ("triton", "step"), ("triton", "chunk")])
def test_a_history_folds_into_another_slot(run, form):
    rng = np.random.default_rng(5)
    given = delta_rule.random_pass(rng, np.float32, False)
    ring = delta_rule.random_ring(rng, given, COUNTS, STARTS)
    slots, to_slots = np.array([3, 0, 5, -1, 5], np.int32), np.array([2, 0, -1, 4, S], np.int32)
    call = functools.partial(fold_history, layer=LAYER, form=form, **RUNS[run])
    folded = np.asarray(
        jax.jit(call, compiler_options=QUICKLY)(
            *delta_rule.on_device((given.state, ring)),
            slots=slots,
            to_slots=to_slots,
            num_tokens=jnp.array([2, 5, 1, 1, 1]),
        )
    )
    counts = np.array([5, 0, 0, 2, 0, 0, 0])
    starts, left = after_history(given, ring, counts, form), given.state.copy()
    for slot, target in ((3, 2), (0, 0)):
        close(folded[LAYER, target], starts[slot])
        left[LAYER, target] = folded[LAYER, target]
    same_bits(folded, left)
