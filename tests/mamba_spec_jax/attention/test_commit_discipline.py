"""A model of one's own on the backends: every pass is committed once, by its own record, and no slot overflows."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.hybrid import HybridAttnBackend
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.slots import reset_slots
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, SpeculativeMode

from .recurrent import assert_same_bits, commit, forward, held, layer_inputs, make_backend, make_inputs, make_weights
from .test_hybrid_linear import MIXED, mixed_inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")

T, MAX_LEN = 4, 6
SLOTS = jnp.array([2, 0, -1], jnp.int32)
ALL = jnp.full(3, T, jnp.int32)
BACKENDS = {
    "snapshot": make_backend(layers=2),
    "replay": make_backend(CommitStrategy.REPLAY, layers=2),
    "of two children": HybridAttnBackend.create(
        make_backend(verify=SpeculativeMode.PREFILL, layers=2), make_backend(layers=2)
    ),
}
WEIGHTS, INPUTS = make_weights(BACKENDS["snapshot"]), make_inputs(BACKENDS["snapshot"], 3, T)


def empty(backend, max_len=MAX_LEN):
    return HybridCache.create(backend.pool_spec, 3, max_len)


def a_pass(backend, cache, mode=ForwardMode.TARGET_VERIFY):
    """As a model of one's own makes it, while tracing; `(cache, record)`."""

    def trace(cache):
        batch = ForwardBatch.create(mode, cache, SLOTS, ALL, T)
        record = backend.init_record(batch)
        for layer in range(2):
            inputs = layer_inputs(BACKENDS["snapshot"].linear, [leaf[layer] for leaf in INPUTS], WEIGHTS[layer])
            _, cache, record = backend.forward(layer, inputs, cache, record, batch)
        return cache, record

    return jax.eval_shape(trace, cache)


def committed(backend, cache, record):
    return jax.eval_shape(backend.update_mamba_state_after_mtp_verify, cache, record, ALL)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_each_pass_is_committed_once_and_before_the_next(name):
    backend = BACKENDS[name]
    start = empty(backend)
    waiting, record = a_pass(backend, start)
    assert waiting.awaiting_commit
    after = committed(backend, waiting, record)
    assert not after.awaiting_commit
    committed(backend, *a_pass(backend, after))
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE, ForwardMode.EXTEND):
        with pytest.raises(ValueError, match=f"mode {mode.name} got a cache that still awaits the commit of a verify"):
            a_pass(backend, waiting, mode)
    for cache in (start, after):
        with pytest.raises(ValueError, match="got a cache that awaits no commit: each verify pass is committed once"):
            committed(backend, cache, record)
    with pytest.raises(ValueError, match="reset_slots got a cache that still awaits the commit"):
        jax.eval_shape(reset_slots, waiting, SLOTS)


def test_what_a_pass_hands_from_layer_to_layer():
    """Each layer once, and the cache and the record of the layer before."""
    attention, recurrence = mixed_inputs()
    cache = HybridCache.create(MIXED.pool_spec, 2, 8)
    rows = jnp.zeros(1, jnp.int32)

    def batch_of(mode):
        return ForwardBatch.create(mode, cache, rows, rows + 2, width=2)

    batch, prompt = batch_of(ForwardMode.TARGET_VERIFY), batch_of(ForwardMode.EXTEND)
    new = MIXED.init_record(batch)
    _, waiting, record = jax.jit(MIXED.forward, static_argnums=0)(0, recurrence, cache, new, batch)
    for call, message in (
        (lambda: MIXED.forward(0, recurrence, waiting, record, batch), "layer 0 in mode TARGET_VERIFY has run its rec"),
        (lambda: MIXED.forward(1, attention, cache, record, batch), "got a cache without the layers that the record"),
        (lambda: MIXED.forward(1, attention, waiting, new, batch), "layer 1 in mode TARGET_VERIFY got a cache that st"),
        (lambda: MIXED.forward(1, attention, waiting, None, batch), "got a record of type NoneType, expected the Ver"),
        (lambda: MIXED.forward(1, attention, cache, record, prompt), "layer 1 in mode EXTEND got a record, expected N"),
        (lambda: MIXED.forward(1, attention, waiting, None, prompt), "layer 1 in mode EXTEND got a cache that still a"),
        (lambda: MIXED.forward(1, attention, None, new, batch), "got a cache of type NoneType, expected a HybridCache"),
        (
            lambda: MIXED.update_mamba_state_after_mtp_verify(waiting, record, rows),
            "got a record without layer 1's attention: call forward in each layer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", ["snapshot", "replay"])
def test_an_older_record_and_a_slot_without_room_change_nothing(name):
    """Values are seen by `validate=True` alone; a jitted commit keeps such a row as it is."""
    backend = BACKENDS[name]
    mode, three = ForwardMode.TARGET_VERIFY, jnp.array([2, 0, 3], jnp.int32)
    check = backend.update_mamba_state_after_mtp_verify
    _, waiting, first = forward(backend, mode, empty(backend), WEIGHTS, SLOTS, ALL, *INPUTS)
    cache = check(waiting, first, three, validate=True)
    np.testing.assert_array_equal(cache.lengths, [1, 0, 3])
    before = held(backend, cache, SLOTS)

    _, waiting, second = forward(backend, mode, cache, WEIGHTS, SLOTS, ALL, *INPUTS)
    after = commit(backend, waiting, first, three)
    np.testing.assert_array_equal(after.lengths, [1, 0, 3])
    message = "row 0: slot 2 held 0 tokens when the record was made and holds 3 now: the record was committed before"
    with pytest.raises(ValueError, match=message):
        check(waiting, first, three, validate=True)
    with pytest.raises(ValueError, match="validate=True reads values, so it cannot run inside jit"):
        jax.jit(lambda *args: check(*args, validate=True))(waiting, second, three)

    # Slot 2 has room for three of the four nodes, slot 0 for all of them.
    for nodes, lengths in (([2, 3, 0], [5, 0, 6]), ([3, 3, 0], [5, 0, 3])):
        nodes = jnp.array(nodes, jnp.int32)
        after = commit(backend, waiting, second, nodes)
        np.testing.assert_array_equal(after.lengths, lengths)
    message = "last_correct_step_indices[0] is 3, but row 0 has nodes 0..2 (its slot had room for no more"
    with pytest.raises(ValueError, match=re.escape(message)):
        check(waiting, second, nodes, validate=True)
    for name in ("ssm", "conv"):
        kept = getattr(held(backend, after, SLOTS), name)[:, 2]
        assert_same_bits(kept, getattr(before, name)[:, 2], "the state of a row without room")
    with pytest.raises(ValueError, match=r"slot 0 is named more than once: slots\[1\], track_slots\[0\]"):
        check(waiting, second, ALL - 3, jnp.array([0, -1, -1], jnp.int32), ALL - 3, validate=True)


def test_a_prompt_is_read_as_far_as_there_is_room():
    backend = BACKENDS["snapshot"]
    mode, num_tokens = ForwardMode.EXTEND, jnp.array([T, 2, T], jnp.int32)
    cache = forward(backend, mode, empty(backend), WEIGHTS, SLOTS, num_tokens, *INPUTS)[1]
    full = forward(backend, mode, cache, WEIGHTS, SLOTS, num_tokens, *INPUTS)[1]
    np.testing.assert_array_equal(full.lengths, [4, 0, MAX_LEN])
    expected = forward(backend, mode, cache, WEIGHTS, SLOTS, jnp.array([2, 2, 0], jnp.int32), *INPUTS)[1]
    jax.tree.map(assert_same_bits, full.mamba, expected.mamba)
    again = forward(backend, mode, full, WEIGHTS, SLOTS.at[1].set(-1), num_tokens, *INPUTS)[1]
    jax.tree.map(assert_same_bits, again.mamba, full.mamba)


def test_equal_texts_are_told_apart():
    backend = BACKENDS["snapshot"]
    waiting, record = a_pass(backend, empty(backend))
    other = dataclasses.replace(backend, full=FullAttention(2.0))
    with pytest.raises(ValueError, match=r"\(they differ in backend\.full\.scale: 1\.0 against 2\.0\)"):
        committed(other, waiting, record)


@pytest.mark.parametrize("came", [None, "record", ["record"]])
def test_what_is_no_record_is_named(came):
    for backend in BACKENDS.values():
        waiting, record = a_pass(backend, empty(backend))
        with pytest.raises(ValueError, match=f"got a record of type {type(came).__name__}, expected the VerifyRecord"):
            backend.update_mamba_state_after_mtp_verify(waiting, came, ALL)
        with pytest.raises(ValueError, match=f"got last_correct_step_indices of type {type(came).__name__}, expected"):
            jax.eval_shape(lambda *args: backend.update_mamba_state_after_mtp_verify(*args, came), waiting, record)  # noqa: B023
