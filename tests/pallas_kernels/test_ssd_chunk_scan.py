"""ssd_chunk_scan against the recurrence token by token in float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels import ssd_chunk_scan
from tests.pallas_kernels import ssm
from tests.pallas_kernels.ssm import LAYER, LIVE, SLOTS, Dims


@functools.partial(jax.jit, static_argnames="chunk_size", compiler_options={"xla_backend_optimization_level": 0})
def scan(state, given, A, D, slots, *, chunk_size):
    x, dt, B, C = (given[name] for name in ("x", "dt", "B", "C"))
    return ssd_chunk_scan(state, x, dt, A, B, C, D, layer=LAYER, slots=slots, chunk_size=chunk_size)


@pytest.mark.parametrize(("dtype", "chunk_size"), [("float32", 4), ("float32", 64), ("bfloat16", 11), ("float16", 3)])
def test_equals_the_recurrence(dtype, chunk_size):
    """Over whole and short chunks, rows that end early, and rows without a slot."""
    scene = ssm.scene(dataclasses.replace(Dims(), T=11, Q=22, P=3, N=5), dtype, dtype)
    y, state = scan(*ssm.arrays([scene.state, scene.inputs, scene.A, scene.D, SLOTS]), chunk_size=chunk_size)
    h0 = np.zeros((SLOTS.size, *scene.state.shape[2:]))
    h0[list(LIVE)] = np.asarray(scene.state[LAYER, SLOTS[list(LIVE)]], np.float64)
    outputs, states = ssm.window(scene, h0, "chunk", None)
    ssm.close(y, outputs, dtype)
    assert y.dtype == scene.inputs["x"].dtype
    pool, live = np.array(state), SLOTS[list(LIVE)]
    ssm.close(pool[LAYER, live], states[list(LIVE), -1], dtype)
    pool[LAYER, live] = scene.state[LAYER, live]
    ssm.same_bits(pool, scene.state)
