"""What is refused while tracing, and what validate=True reports: the messages, as users meet them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import state_commit, state_scatter


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def ints(*values):
    return jnp.array(values, jnp.int32)


SCATTER = {"dst": zeros(2, 5, 3), "src": zeros(2, 4, 6, 3), "slots": ints(0, 1), "steps": ints(0, 0)}
COMMIT = {
    "ssm": zeros(2, 5, 3),
    "conv": zeros(2, 5, 3, 7),
    "ssm_states": zeros(2, 4, 6, 3),
    "conv_inputs": zeros(2, 4, 6, 7),
    "slots": ints(0, 1),
    "steps": ints(0, 0),
}
# Leaves without elements: everything is checked and nothing has to be compiled.
EMPTY = {"dst": zeros(2, 5, 0), "src": zeros(2, 4, 6, 0)}
EMPTY_POOLS = {
    "ssm": zeros(2, 5, 0),
    "conv": zeros(2, 5, 3, 0),
    "ssm_states": zeros(2, 4, 6, 0),
    "conv_inputs": zeros(2, 4, 6, 0),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": {}, "src": {}}, "dst has no leaves"),
        ({"dst": {"a": zeros(2, 5)}, "src": [zeros(2, 4, 6)]}, "expected the structure of dst"),
        ({"dst": {"a": zeros(2)}, "src": {"a": zeros(2, 4, 6)}}, "dst['a'] has shape [2], expected [L, S, ...]"),
        ({"src": zeros(2, 4)}, "src has shape [2, 4], expected [L, R, T, ...]"),
        ({"src": zeros(2, 4, 6, 9)}, "src has shape [2, 4, 6, 9], expected [2, 4, 6, 3]"),
        ({"src": zeros(1, 4, 6, 3)}, "src has shape [1, 4, 6, 3], expected [2, 4, 6, 3]"),
        ({"src": zeros(2, 4, 6, 3, dtype=jnp.bfloat16)}, "src is bfloat16, expected float32 as dst"),
        (
            {"dst": {"a": zeros(2, 5), "b": zeros(2, 6)}, "src": {"a": zeros(2, 4, 6), "b": zeros(2, 4, 6)}},
            "dst['b'] has shape [2, 6], expected [2, 5]",
        ),
        (
            {"dst": {"a": zeros(2, 5), "b": zeros(2, 5)}, "src": {"a": zeros(2, 4, 6), "b": zeros(2, 3, 6)}},
            "src['b'] has shape [2, 3, 6], expected [2, 4, 6]",
        ),
        ({"slots": zeros(2)}, "slots is float32, expected int32; cast it with .astype(jnp.int32)"),
        ({"slots": ints([0], [1])}, "slots has shape [2, 1], expected [B]"),
        ({"steps": ints(0)}, "steps has shape [1], expected [2]"),
        ({"rows": ints(0, 1, 2)}, "rows has shape [3], expected [2]"),
        (
            {"slots": ints(*range(5)), "steps": ints(*range(5))},
            "slots has B = 5 entries but the source only R = 4 rows",
        ),
        ({"track_slots": ints(3, 4)}, "track_steps is None"),
        ({"track_steps": ints(3, 4)}, "track_slots is None"),
        ({"track_slots": ints(3), "track_steps": ints(3, 4)}, "track_slots has shape [1], expected [2]"),
        ({"implementation": "cuda"}, "implementation is 'cuda'; expected None or one of xla, triton"),
        ({"interpret": True}, "interpret=True interprets a GPU kernel; implementation is None"),
        ({"interpret": True, "implementation": "xla"}, "implementation is 'xla', expected 'triton' or 'mosaic_gpu'"),
    ],
)
def test_state_scatter_refuses(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        jax.eval_shape(lambda: state_scatter(**(SCATTER | change)))
    assert str(raised.value).startswith("state_scatter: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm": [], "ssm_states": [], "conv": [], "conv_inputs": []}, "ssm and conv have no leaves"),
        ({"conv": zeros(2, 5, 7)}, "conv has shape [2, 5, 7], expected [L, S, W-1, C]"),
        ({"conv": zeros(2, 6, 3, 7)}, "conv has shape [2, 6, 3, 7], expected [2, 5, 3, 7]"),
        ({"conv_inputs": zeros(2, 4, 6, 8)}, "conv_inputs has shape [2, 4, 6, 8], expected [2, 4, 6, 7]"),
        *(
            (
                {"conv": zeros(2, 5, 3, 7, dtype=dtype), "conv_inputs": zeros(2, 4, 6, 7, dtype=dtype)},
                f"conv is {dtype}, expected a floating or integer dtype",
            )
            for dtype in ("bool", "complex64")
        ),
        ({"conv_inputs": zeros(2, 4, 5, 7)}, "conv_inputs has shape [2, 4, 5, 7], expected [2, 4, 6, 7]"),
        ({"conv_inputs": zeros(2, 4, 6, 7, dtype=jnp.float16)}, "conv_inputs is float16, expected float32 as conv"),
        ({"parents": ints(0, 0)}, "parents has shape [2], expected [2, 6]"),
        ({"parents": zeros(2, 6)}, "parents is float32, expected int32"),
        ({"track_slots": ints(3, 4)}, "track_steps is None"),
    ],
)
def test_state_commit_refuses(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        jax.eval_shape(lambda: state_commit(**(COMMIT | change)))
    assert str(raised.value).startswith("state_commit: ")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"slots": ints(1, 1)}, ["slot 1 is named more than once: slots[0], slots[1]"]),
        ({"slots": ints(5, -3)}, ["slots[0] = 5 is out of range (-1 or 0..4)", "slots[1] = -3 is out of range"]),
        ({"steps": ints(6, 0)}, ["steps[0] = 6 is out of range (-1 or 0..5)"]),
        ({"rows": ints(0, 4)}, ["rows[1] = 4 is out of range (-1 or 0..3)"]),
        (
            {"track_slots": ints(1, 2), "track_steps": ints(0, 0)},
            ["slot 1 is named more than once: slots[1], track_slots[0]"],
        ),
        ({"track_slots": ints(3, 3), "track_steps": ints(0, 7)}, ["track_steps[1] = 7 is out of range (-1 or 0..5)"]),
    ],
)
def test_validate_reports_values_with_their_positions(change, messages):
    for op, arguments in ((state_scatter, SCATTER), (state_commit, COMMIT)):
        with pytest.raises(ValueError, match=re.escape(messages[0])) as raised:
            op(**(arguments | change), validate=True)
        assert all(message in str(raised.value) for message in messages)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"slots": ints(-1, -1)},
        {"slots": ints(0, 0), "steps": ints(-1, -1)},  # padding rows share the dummy slot
        {"slots": ints(0, 0), "steps": ints(-1, 2)},
        {"track_slots": ints(3, -1), "track_steps": ints(5, -1)},
        {"slots": np.zeros(0, np.int32), "steps": np.zeros(0, np.int32)},
    ],
)
def test_validate_accepts_padding(change):
    state_scatter(**(SCATTER | EMPTY | change), validate=True)
    state_commit(**(COMMIT | EMPTY_POOLS | change), validate=True)


def test_validate_knows_that_a_tracked_entry_reads_its_live_slot():
    """Entry 0 only tracks, from slot 0; entry 1 tracks into slot 0: a race in state_commit, none in state_scatter."""
    change = {"steps": ints(-1, 0), "track_slots": ints(3, 0), "track_steps": ints(0, 0), "validate": True}
    state_scatter(**(SCATTER | EMPTY | change))
    with pytest.raises(ValueError, match=re.escape("slot 0 is named more than once: track_slots[1], slots[0]")):
        state_commit(**(COMMIT | change))


@pytest.mark.parametrize("parent", [1, 2, -2])
def test_validate_reports_parents_that_do_not_come_first(parent):
    parents = np.tile(np.arange(-1, 5, dtype=np.int32), (2, 1))
    state_commit(**(COMMIT | EMPTY_POOLS), parents=parents, validate=True)
    parents[1, 1] = parent
    with pytest.raises(ValueError, match=re.escape(f"parents[1, 1] = {parent} is not an earlier node or -1")):
        state_commit(**COMMIT, parents=parents, validate=True)


def test_validate_cannot_run_inside_jit():
    with pytest.raises(ValueError, match="validate=True reads index values, so it cannot run inside jit"):
        jax.jit(lambda slots: state_scatter(**(SCATTER | {"slots": slots}), validate=True))(ints(0, 1))
