"""selective_state_update against the recurrence's definition in float64: outputs, states, and bytes left alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fold_history, selective_state_update
from tests.pallas_kernels import ssm
from tests.pallas_kernels.ssm import FOLD, LAYER, LIVE, PARENTS, SLOTS, Dims

RUNS = {"xla": {}, "triton": {"implementation": "triton", "interpret": True}}
QUICKLY = {"xla_backend_optimization_level": 0}
FORMS, DTYPES = ("step", "chunk"), ("float32", "bfloat16", "float16")
# A tree has no last state.
KEPT = [(keep, tree) for keep, tree in itertools.product(("state", "snapshots", "ring"), (False, True)) if
        not (tree and keep == "state")]  # fmt: skip


@functools.partial(jax.jit, static_argnames=("keep", "form", "run"), compiler_options=QUICKLY)
def update(given, A, D, state, snapshots, ring, parents, *, keep, form, run):
    kept = {"snapshots": snapshots} if keep == "snapshots" else {}
    if keep == "ring":
        kept = {"ring": ring, "fold": jnp.asarray(FOLD)}
    options = {"layer": LAYER, "slots": jnp.asarray(SLOTS), "parents": parents, "form": form, **RUNS[run], **kept}
    x, dt, B, C = (given[name] for name in ("x", "dt", "B", "C"))
    return selective_state_update(
        state, x, dt, A, B, C, D, disable_state_update=keep == "nothing", **options
    )  # fmt: skip


def check(run, form, keep, tree, state_dtype, dtype, dims=None):
    scene = ssm.scene(dims or Dims(), state_dtype, dtype)
    parents = PARENTS if tree else None
    given = ssm.arrays([scene.inputs, scene.A, scene.D, scene.state, scene.snapshots, scene.ring, parents])
    result = update(*given, keep=keep, form=form, run=run)

    h0 = np.zeros((SLOTS.size, *scene.state.shape[2:]))
    h0[list(LIVE)] = np.asarray(scene.state[LAYER, SLOTS[list(LIVE)]], np.float64)
    before = ssm.histories(scene, form) if keep == "ring" else h0
    outputs, states = ssm.window(scene, before, form, parents)
    assert result.y.dtype == jnp.dtype(dtype)
    ssm.close(result.y, outputs, dtype, state_dtype)

    pool = np.array(result.state)
    if keep in ("state", "ring"):
        written = [row for row in LIVE if keep == "state" or FOLD[row]]
        left = states[:, -1] if keep == "state" else before
        ssm.close(pool[LAYER, SLOTS[written]], left[written], state_dtype)
        pool[LAYER, SLOTS[written]] = scene.state[LAYER, SLOTS[written]]
    ssm.same_bits(pool, scene.state)
    if keep == "snapshots":
        ssm.close(result.snapshots[LAYER], states, state_dtype)
        ssm.same_bits(result.snapshots[1 - LAYER], scene.snapshots[1 - LAYER])
    if keep == "ring":
        check_ring(result.ring, scene)


def check_ring(ring, scene):
    """The window's inputs lie behind each row's history, bit for bit, and nothing else has changed."""
    T, Q = scene.inputs["dt"].shape[1], ring.length
    for name, kept in scene.ring.inputs.items():
        expected = kept.copy()
        for row in LIVE:
            slot = SLOTS[row]
            places = (scene.ring.starts[slot] + scene.ring.counts[slot] + np.arange(T)) % Q
            expected[LAYER, slot, scene.ring.order[slot, places]] = scene.inputs[name][row]
        ssm.same_bits(ring.inputs[name], expected)
    for name in ("starts", "counts", "order"):
        np.testing.assert_array_equal(getattr(ring, name), getattr(scene.ring, name))


@pytest.mark.parametrize(("keep", "tree"), KEPT)
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_equals_the_definition(form, keep, tree):
    check("xla", form, keep, tree, "float32", "float32")


@pytest.mark.parametrize(("keep", "tree"), [("state", False), ("snapshots", True), ("ring", False)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("form", FORMS)
def test_the_reference_in_16_bits(form, dtype, keep, tree):
    check("xla", form, keep, tree, dtype, dtype)


# Every kept thing, form and dtype, on chains and on trees; `tests/sweeps` has all their combinations.
@pytest.mark.parametrize(
    ("form", "keep", "tree", "state_dtype", "dtype"),
    [
        ("step", "state", False, "float32", "float32"),
        ("step", "snapshots", False, "float16", "float16"),
        ("step", "snapshots", True, "float32", "bfloat16"),
        ("step", "ring", False, "float32", "float32"),
        ("step", "ring", True, "bfloat16", "bfloat16"),
        ("chunk", "state", False, "float32", "float32"),
        ("chunk", "snapshots", False, "bfloat16", "bfloat16"),
        ("chunk", "snapshots", True, "float32", "float32"),
        ("chunk", "ring", False, "float32", "bfloat16"),
        ("chunk", "ring", True, "float16", "float16"),
    ],
)
def test_the_kernels_equal_the_definition(form, keep, tree, state_dtype, dtype):
    check("triton", form, keep, tree, state_dtype, dtype)


@pytest.mark.parametrize(("run", "form"), [("xla", "step"), ("triton", "chunk")])
def test_outputs_alone(run, form):
    check(run, form, "nothing", False, "float32", "float32")


@functools.partial(jax.jit, static_argnames=("form", "run"), compiler_options=QUICKLY)
def fold(state, ring, A, slots, num_tokens, to_slots, *, form, run):
    return fold_history(
        state, ring, A, layer=LAYER, slots=slots, num_tokens=num_tokens, to_slots=to_slots, form=form, **RUNS[run]
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_fold_history_writes_the_state_after_some_inputs(run, form):
    """Into the slot itself, into another one, and nowhere."""
    scene = ssm.scene(Dims(), "float32", "float32")
    counts, to_slots = np.array([4, 2, 0, 1, 1], np.int32), np.array([4, 3, 5, 1, -1], np.int32)
    given = ssm.arrays([scene.state, scene.ring, scene.A, SLOTS, counts, to_slots])
    pool = np.array(fold(*given, form=form, run=run))
    states = ssm.histories(scene, form, counts)
    ssm.close(pool[LAYER, [4, 5]], states[[0, 2]], "float32")
    pool[LAYER, [4, 5]] = scene.state[LAYER, [4, 5]]
    ssm.same_bits(pool, scene.state)


def test_the_counts_and_the_slots_themselves_are_folds_defaults():
    scene = ssm.scene(Dims(), "float32", "float32")
    state, ring, A, slots = ssm.arrays([scene.state, scene.ring, scene.A, SLOTS])
    counts = jnp.asarray(np.where(np.isin(SLOTS, [0, 2, 4]), scene.ring.counts[SLOTS % 6], 0))
    ssm.same_bits(
        fold(state, ring, A, slots, None, None, form="step", run="xla"),
        fold(state, ring, A, slots, counts, slots, form="step", run="xla"),
    )
