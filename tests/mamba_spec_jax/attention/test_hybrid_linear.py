"""What one backend refuses, how it routes its layers, and commits at the edges."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.base import AttentionInputs, ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.attention.mamba2 import Mamba2Inputs
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.modes import CommitStrategy, ForwardMode

from .recurrent import assert_same_bits, commit, forward, make_backend, make_inputs, make_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = jnp.zeros(1, jnp.int32)
STEPS = jnp.array([2, 0], jnp.int32)


def verified(backend):
    """Two rows, of three and four real tokens."""
    slots = jnp.arange(2, dtype=jnp.int32)
    cache = HybridCache.create(backend.pool_spec, 3, 8)
    mode, weights, inputs = ForwardMode.TARGET_VERIFY, make_weights(backend), make_inputs(backend, 2, 4)
    _, cache, record = forward(backend, mode, cache, weights, slots, slots + 3, *inputs)
    return cache, record


COMMIT_ERRORS = {
    "mamba_track_indices and mamba_steps_to_track go together: got only the indices": (STEPS, STEPS, None),
    "mamba_track_indices and mamba_steps_to_track go together: got only the steps": (STEPS, None, STEPS),
    "got last_correct_step_indices int32[3], expected int32[2]": (jnp.zeros(3, jnp.int32),),
    "got last_correct_step_indices float32[2], expected int32[2]": (jnp.zeros(2),),
    "got mamba_track_indices int32[1], expected int32[2]": (
        STEPS,
        jnp.zeros(1, jnp.int32),
        STEPS,
    ),
    "got mamba_steps_to_track float32[2], expected int32[2]": (
        STEPS,
        STEPS,
        jnp.zeros(2),
    ),
}


@pytest.mark.parametrize("strategy", [CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY])
@pytest.mark.parametrize("message", list(COMMIT_ERRORS))
def test_commit_arguments_are_checked_while_tracing(message, strategy):
    backend = make_backend(strategy)
    cache, record = verified(backend)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(backend.update_mamba_state_after_mtp_verify, cache, record, *COMMIT_ERRORS[message])


def test_indices_of_any_integer_width():
    """Whatever argmax and sums give; the kernels take int32."""
    backend = make_backend()
    cache, record = verified(backend)
    indices = [STEPS, jnp.array([2, -1], jnp.int32), STEPS]
    expected = commit(backend, cache, record, *indices)
    narrow = [index.astype(jnp.int16) for index in indices]
    actual = commit(backend, cache, record, *narrow)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_an_empty_batch_commits_nothing():
    backend = make_backend()
    cache = HybridCache.create(backend.pool_spec, 3, 8)
    nobody, inputs = jnp.zeros(0, jnp.int32), make_inputs(backend, 0, 2)
    mode, weights = ForwardMode.TARGET_VERIFY, make_weights(backend)
    _, cache, record = forward(backend, mode, cache, weights, nobody, nobody, *inputs)
    after = commit(backend, cache, record, nobody)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(after), jax.tree.leaves(cache))


MIXED = HybridLinearAttnBackend(2, (1,), FullAttention(1.0), make_backend().linear, dataclasses.replace(
    make_backend().pool_spec, attention_layers=1, kv_heads=1, kv_head_dim=2
))  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_layers", 2),
        ("recurrent_layers", 3),
        ("heads", 4),
        ("head_dim", 4),
        ("state", 4),
        ("conv_width", 5),
        ("conv_channels", 4),
    ],
)
def test_a_pool_spec_that_does_not_fit_the_layers_is_refused(field, value):
    expected = getattr(MIXED.pool_spec, field)
    with pytest.raises(
        ValueError, match=f"pool_spec.{field} is {value}, expected {expected} from this backend's layers"
    ):
        dataclasses.replace(MIXED, pool_spec=dataclasses.replace(MIXED.pool_spec, **{field: value}))


def mixed_inputs():
    weights, (xBC, dt) = make_weights(MIXED)[0], make_inputs(MIXED, 1, 2)
    attention = AttentionInputs(*(jnp.ones((1, 2, heads, 2)) for heads in (2, 1, 1)))
    return attention, Mamba2Inputs(xBC[0], dt[0], weights)


def test_layers_are_routed_by_kind_and_inputs_checked():
    cache = HybridCache.create(MIXED.pool_spec, 2, 8)
    batch = ForwardBatch.create(ForwardMode.EXTEND, cache, ROWS, ROWS + 2, width=2)
    attention, recurrence = mixed_inputs()
    assert MIXED.init_record(batch) is None
    for layer_id, given, message in (
        (0, attention, "layer 0 is a recurrent layer: got AttentionInputs, expected Mamba2Inputs"),
        (1, recurrence, "layer 1 is a full-attention layer: got Mamba2Inputs, expected AttentionInputs"),
    ):
        with pytest.raises(ValueError, match=message):
            MIXED.forward(layer_id, given, cache, None, batch)
    forward = jax.jit(MIXED.forward, static_argnums=0)
    y, after, _ = forward(0, recurrence, cache, None, batch)
    assert y.shape == (1, 2, 3, 5)
    jax.tree.map(assert_same_bits, after.kv, cache.kv)
    assert np.any(np.asarray(after.mamba.ssm[:, 0]))
    y, after, _ = forward(1, attention, cache, None, batch)
    assert y.shape == (1, 2, 2, 2)
    jax.tree.map(assert_same_bits, after.mamba, cache.mamba)
    assert np.any(np.asarray(after.kv.keys[0][0]))


def test_a_layer_may_be_both_or_neither():
    """In a layer of both kinds the inputs decide; a layer of neither mixes no tokens."""
    spec = dataclasses.replace(MIXED.pool_spec, recurrent_layers=2)
    both = HybridLinearAttnBackend(3, (1,), MIXED.full, MIXED.linear, spec, linear_attn_layers=(0, 1))
    cache = HybridCache.create(spec, 2, 8)
    batch = ForwardBatch.create(ForwardMode.EXTEND, cache, ROWS, ROWS + 2, width=2)
    attention, recurrence = mixed_inputs()
    y, after, _ = both.forward(1, recurrence, cache, None, batch)
    assert y.shape == (1, 2, 3, 5)
    jax.tree.map(assert_same_bits, after.kv, cache.kv)
    assert not np.any(np.asarray(after.mamba.ssm[0]))
    assert np.any(np.asarray(after.mamba.ssm[1, 0]))
    y, after, _ = both.forward(1, attention, cache, None, batch)
    assert y.shape == (1, 2, 2, 2)
    assert np.any(np.asarray(after.kv.keys[0][0]))
    for layer_id, given, message in (
        (0, attention, "layer 0 is a recurrent layer: got AttentionInputs, expected Mamba2Inputs"),
        (1, None, "a full-attention and recurrent layer: got NoneType, expected AttentionInputs or Mamba2Inputs"),
        (2, recurrence, "layer 2 is a feed-forward layer: got Mamba2Inputs, expected the id of a token mixer .*1"),
    ):
        with pytest.raises(ValueError, match=message):
            both.forward(layer_id, given, cache, None, batch)
    assert dataclasses.replace(MIXED, linear_attn_layers=(0,)) == MIXED, "every other layer, if they are not named"
    assert hash(MIXED) == hash(dataclasses.replace(MIXED, linear_attn_layers=None))


def test_idle_gives_zeros_and_touches_nothing():
    cache = HybridCache.create(MIXED.pool_spec, 2, 8)
    batch = ForwardBatch.create(ForwardMode.IDLE, cache, ROWS, ROWS + 2, width=2)
    assert MIXED.init_record(batch) is None
    for layer_id, inputs, shape in zip((1, 0), mixed_inputs(), ((1, 2, 2, 2), (1, 2, 3, 5)), strict=True):
        y, after, record = MIXED.forward(layer_id, inputs, cache, None, batch)
        assert y.shape == shape
        assert not np.any(np.asarray(y))
        assert after is cache
        assert record is None
