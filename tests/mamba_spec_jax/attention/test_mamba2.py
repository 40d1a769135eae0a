"""Prompts through the backend, and the recurrence in chunks, against float64; and what the backend refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.mamba2 import Mamba2
from mamba_spec_jax.modes import ForwardMode
from pallas_kernels.recurrent import chunks
from pallas_kernels.selective_state_update.recurrence import Mamba2 as Rule
from pallas_kernels.selective_state_update.recurrence import SSMInputs

from . import oracle
from .recurrent import (
    SLOTS,
    assert_same_bits,
    forward,
    make_backend,
    make_inputs,
    make_weights,
    occupied,
    projected,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, H, P, N = 3, 10, 6, 5, 7


def draw_ssm(groups, seed=0):
    rng = np.random.default_rng(seed)
    inputs = SSMInputs(
        x=rng.normal(size=(B, T, H, P)),
        dt=rng.exponential(size=(B, T, H)),
        B=rng.normal(size=(B, T, groups, N)),
        C=rng.normal(size=(B, T, groups, N)),
    )
    inputs.dt[1, 6:] = 0  # padding: the state stays
    A = -rng.exponential(size=H)
    A[0] = -200.0  # a head that forgets at once: its decay underflows
    return rng.normal(size=(B, H, P, N)), inputs, A, rng.normal(size=H)


@functools.partial(jax.jit, static_argnames="chunk_size")
def chunk_scan(h0, inputs, A, D, chunk_size):
    return chunks.chunk_scan(Rule(A, D), h0, inputs, chunk_size)


def single(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree)


def exact(h0, inputs, A, D):
    rows = [oracle.ssm(h0[b], inputs.x[b], inputs.dt[b], inputs.B[b], inputs.C[b], A, D) for b in range(B)]
    return tuple(np.stack(leaves) for leaves in zip(*rows, strict=True))


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_chunk_scan(chunk_size):
    arguments = draw_ssm(groups=2)
    outputs, states = exact(*arguments)
    y, h = chunk_scan(*single(arguments), chunk_size=chunk_size)
    np.testing.assert_allclose(y, outputs, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(h, states[:, -1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"heads": 6, "groups": 3, "conv_width": 2, "dt_limits": (0.2, 0.8)}])
def test_prefill_against_float64(options):
    """From states that are not zero, with ragged, empty and padding rows, T no multiple of the chunk."""
    backend = make_backend(**options)
    slots, counts = np.array([5, -1, 2, 7], np.int32), np.array([T, T, 6, 0], np.int32)
    weights = make_weights(backend, bias=not options)
    cache = occupied(backend, slots[[0, 2, 3]], np.array([3, 8, 1], np.int32))
    xBC, dt = make_inputs(backend, len(slots), T)
    for leaf in (xBC, dt):  # what a row holds behind its tokens is finite, and else anything
        leaf[:, np.arange(T) >= counts[:, None]] = 1e4
    outputs, after, _ = forward(backend, ForwardMode.EXTEND, cache, weights, jnp.asarray(slots), counts, xBC, dt)
    ssm, conv = np.array(cache.mamba.ssm), np.array(cache.mamba.conv)
    for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        if slot < 0 or count == 0:
            continue
        inputs = (projected(leaf[0, row, :count]).astype(np.float64) for leaf in (xBC, dt))
        state, window = ssm[0, slot].astype(np.float64), conv[0, slot].astype(np.float64)
        y, states, window = oracle.mamba2(backend.linear, weights[0], window, state, *inputs)
        np.testing.assert_allclose(outputs[0, row, :count], y, rtol=5e-5, atol=5e-5)
        np.testing.assert_allclose(after.mamba.ssm[0, slot], states[-1], rtol=5e-5, atol=5e-5)
        assert_same_bits(after.mamba.conv[0, slot], window.astype(np.float32))
    untouched = np.setdiff1d(np.arange(SLOTS), [5, 2])  # slot 7 had no tokens
    assert_same_bits(after.mamba.ssm[:, untouched], ssm[:, untouched])
    assert_same_bits(after.mamba.conv[:, untouched], conv[:, untouched])


def test_large_steps_do_not_overflow():
    """exp(c_t - c_j) above the diagonal would be inf, and inf times zero NaN."""
    h0, inputs, A, D = draw_ssm(groups=1)
    inputs = inputs._replace(dt=np.full((B, T, H), 50.0))
    y, h = chunk_scan(*single((h0, inputs, A, D)), chunk_size=T)
    outputs, states = exact(h0, inputs, A, D)
    np.testing.assert_allclose(y, outputs, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(h, states[:, -1], rtol=1e-4, atol=1e-4)


def test_long_chunks_keep_the_digits_of_short_distances():
    """Sums of decays that grow to thousands over a chunk, while neighbouring tokens still see each other."""
    rng = np.random.default_rng(0)
    x, dt, B_, C = (
        rng.normal(size=(1, 256, 2, 3)),
        rng.exponential(0.5, (1, 256, 2)),
        *rng.normal(size=(2, 1, 256, 1, 4)),
    )
    inputs, h0, A, D = SSMInputs(x, dt, B_, C), np.zeros((1, 2, 3, 4)), np.array([-16.0, -100.0]), np.zeros(2)
    outputs, states = oracle.ssm(h0[0], x[0], dt[0], B_[0], C[0], A, D)
    assert np.abs(np.sum(dt[0] * A, axis=0)).max() > 1e4
    y, h = chunk_scan(*single((h0, inputs, A, D)), chunk_size=256)
    np.testing.assert_allclose(y[0], outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(h[0], states[-1], rtol=1e-5, atol=1e-5)


def test_heads_must_be_a_multiple_of_groups():
    with pytest.raises(ValueError, match="Mamba2 has 6 heads, expected a multiple of its 4 groups"):
        Mamba2(heads=6, head_dim=4, state=4, groups=4, conv_width=4)
