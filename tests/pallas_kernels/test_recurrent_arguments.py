"""What the recurrent ops refuse while tracing, and in which words."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import causal_conv1d_update, fold_history, selective_state_update, ssd_chunk_scan
from pallas_kernels.ring import Ring

L, S, B, T, H, P, N, G, Q = 2, 5, 3, 4, 4, 3, 5, 2, 8


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def rings(length=Q, **changed):
    inputs = {"x": struct(L, S, length, H, P), "dt": struct(L, S, length, H), "B": struct(L, S, length, G, N)}
    cursor = struct(S, dtype="int32")
    return Ring(inputs | changed, cursor, cursor, struct(S, length, dtype="int32"))


def trace(function, **changed):
    given = {
        "state": struct(L, S, H, P, N),
        "x": struct(B, T, H, P),
        "dt": struct(B, T, H),
        "A": struct(H),
        "B": struct(B, T, G, N),
        "C": struct(B, T, G, N),
        "D": struct(H),
        "slots": struct(B, dtype="int32"),
        "layer": 0,
    } | changed
    arrays = {name: value for name, value in given.items() if not isinstance(value, str | int | bool | None)}
    static = {name: value for name, value in given.items() if name not in arrays}
    return jax.eval_shape(lambda arrays: function(**arrays, **static), arrays)


FOLD = struct(B, dtype="bool")
SNAPSHOTS = struct(L, B, T, H, P, N)
REFUSED = [
    ({"state": struct(L, S, H, P)}, r"state has shape \[2, 5, 4, 3\], expected \[L, S, H, P, N\]"),
    ({"state": struct(L, S, H, P, N, dtype="int8")}, "state is int8, expected one of float32, bfloat16, float16"),
    ({"x": struct(B, T, H, P + 1)}, r"x has shape \[3, 4, 4, 4\], expected \[B, T, 4, 3\]"),
    ({"x": struct(B, T, H, P, dtype="int32")}, "x is int32, expected a floating dtype"),
    ({"dt": struct(B, T, H, dtype="bfloat16")}, "dt is bfloat16, expected float32"),
    ({"B": struct(B, T, 3, N), "C": struct(B, T, 3, N)}, "B has G = 3, expected a divisor of the 4 heads"),
    ({"C": struct(B, T, 1, N)}, r"C has shape \[3, 4, 1, 5\], expected \[3, 4, 2, 5\]"),
    ({"D": struct(H, P)}, r"D has shape \[4, 3\], expected \[4\]"),
    ({"slots": struct(B)}, "slots is float32, expected int32"),
    ({"slots": struct(B + 1, dtype="int32")}, r"slots has shape \[4\], expected \[3\]"),
    ({"layer": L}, "layer is 2, expected an integer in 0..1"),
]
OF_THE_UPDATE = [
    ({"form": "fast"}, "form is 'fast', expected 'step' or 'chunk'"),
    ({"snapshots": struct(L, B, T + 1, H, P, N)}, r"snapshots has shape .* expected \[2, 3, 4, 4, 3, 5\]"),
    ({"snapshots": struct(*SNAPSHOTS.shape, dtype="bfloat16")}, "snapshots is bfloat16, expected float32"),
    ({"ring": rings()}, "fold is None; pass ring and fold together"),
    ({"fold": FOLD}, "ring is None; pass ring and fold together"),
    ({"ring": rings(), "fold": struct(B, dtype="int32")}, "fold is int32, expected bool"),
    ({"ring": rings(2 * T - 1), "fold": FOLD}, r"the ring holds Q = 7 inputs, expected 2 T = 8 or more"),
    ({"ring": rings(C=struct(L, S)), "fold": FOLD}, "expected a dict of x, dt, B"),
    ({"ring": rings()._replace(order=struct(S)), "fold": FOLD}, r"ring.order has shape \[5\], expected \[5, Q\]"),
    ({"ring": rings()._replace(order=struct(S, Q)), "fold": FOLD}, "ring.order is float32, expected int32"),
    ({"ring": rings(x=struct(L, S, Q, H, P, dtype="bfloat16")), "fold": FOLD}, "'x'.* is bfloat16, expected float32"),
    ({"ring": rings(B=struct(L, S, Q, 1, N)), "fold": FOLD}, r"'B'.* has shape \[2, 5, 8, 1, 5\]"),
    ({"ring": rings(), "fold": FOLD, "snapshots": SNAPSHOTS}, "snapshots and ring are given"),
    ({"disable_state_update": True, "snapshots": SNAPSHOTS}, "snapshots and disable_state_update are given"),
    ({"parents": struct(B, T, dtype="int32")}, "a tree has no last state to write"),
    ({"parents": struct(B, T + 1, dtype="int32"), "disable_state_update": True}, r"parents has shape \[3, 5\]"),
    ({"interpret": True}, "interpret=True interprets a GPU kernel"),
    ({"implementation": "cuda"}, "implementation is 'cuda'"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED + OF_THE_UPDATE)
def test_the_update_refuses(changed, message):
    with pytest.raises(ValueError, match=f"selective_state_update: .*(?:{message})"):
        trace(selective_state_update, **changed)


@pytest.mark.parametrize(("changed", "message"), [*REFUSED, ({"chunk_size": 0}, "chunk_size is 0")])
def test_the_chunk_scan_refuses(changed, message):
    with pytest.raises(ValueError, match=f"ssd_chunk_scan: .*(?:{message})"):
        trace(ssd_chunk_scan, **changed)


def test_a_named_kernel_does_not_fall_back():
    with pytest.raises(NotImplementedError, match="'triton' cannot run on cpu"):
        trace(selective_state_update, implementation="triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_tokens": struct(B, dtype="float32")}, "num_tokens is float32, expected int32"),
        ({"to_slots": struct(B - 1, dtype="int32")}, r"to_slots has shape \[2\], expected \[3\]"),
        ({"ring": Ring({"x": struct(L, S, Q, H, P)}, None, None, None)}, "expected a dict of x, dt, B"),
    ],
)
def test_a_fold_refuses(changed, message):
    given = {"state": struct(L, S, H, P, N), "ring": rings(), "A": struct(H), "slots": struct(B, dtype="int32")}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda given: fold_history(**given, layer=0), given | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": struct(B, 7)}, r"x has shape \[3, 7\], expected \[B, T, C\]"),
        ({"conv_state": struct(L, S, 2, 7)}, r"conv_state has shape \[2, 5, 2, 7\], expected \[L, S, 3, 7\]"),
        ({"weight": struct(0, 7)}, "weight has W = 0 taps"),
        ({"bias": struct(4)}, r"bias has shape \[4\], expected \[7\]"),
        ({"conv_inputs": struct(L, B, T, 7, dtype="float16")}, "conv_inputs is float16, expected float32"),
        ({"parents": struct(B, T, dtype="int32")}, "a tree has no last window"),
        (
            {"conv_inputs": struct(L, B, T, 7), "num_tokens": struct(B, dtype="int32")},
            "num_tokens advances windows, which conv_inputs leaves to the commit",
        ),
    ],
)
def test_the_convolution_refuses(changed, message):
    given = {
        "x": struct(B, T, 7),
        "conv_state": struct(L, S, 3, 7),
        "weight": struct(4, 7),
        "slots": struct(B, dtype="int32"),
    }
    with pytest.raises(ValueError, match=f"causal_conv1d_update: {message}"):
        jax.eval_shape(lambda given: causal_conv1d_update(**given, layer=0), given | changed)
