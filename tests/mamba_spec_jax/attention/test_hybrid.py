"""Two children, one selector: every pass, and the commit of what it left, reaches the right one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.hybrid import HybridAttnBackend
from mamba_spec_jax.attention.mamba2 import Mamba2Inputs
from mamba_spec_jax.cache.pools import HybridCache, PoolSpec
from mamba_spec_jax.cache.records import RecordSpec, VerifyRecord
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, SpeculativeMode

from .recurrent import assert_same_bits, make_backend, make_inputs, make_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

SPEC = PoolSpec(recurrent_layers=1, heads=1, head_dim=1, state=1, conv_width=2, conv_channels=1)
ROWS = jnp.zeros(1, jnp.int32)


@jax.tree_util.register_static
class Child:
    """Does nothing but write down what reached it."""

    def __init__(self, pool_spec=SPEC):
        self.pool_spec = pool_spec
        self.reached = []

    def init_record(self, batch):
        self.reached.append(("init_record", batch.mode))
        spec = RecordSpec(self, batch.mode, CommitStrategy.SNAPSHOT)
        return VerifyRecord(ROWS, ROWS, ROWS, None, jnp.zeros((1, 1, 1, 1)), spec)

    def forward(self, layer_id, inputs, cache, record, batch):
        self.reached.append(("forward", layer_id, batch.mode))
        return inputs, cache, record

    def update_mamba_state_after_mtp_verify(
        self, cache, record, last_correct_step_indices, mamba_track_indices=None, mamba_steps_to_track=None
    ):
        self.reached.append(("commit", last_correct_step_indices, mamba_track_indices, mamba_steps_to_track))
        return cache


class NoCommit:
    pool_spec = SPEC
    init_record = Child.init_record
    forward = Child.forward


class AnythingGoes(NoCommit):
    def update_mamba_state_after_mtp_verify(self, *args, **kwargs):
        raise NotImplementedError


class TwoArguments(NoCommit):
    def update_mamba_state_after_mtp_verify(self, cache, last_correct_step_indices):
        raise NotImplementedError


class Attribute(NoCommit):
    update_mamba_state_after_mtp_verify = True


def one_pass(backend, mode, cache=None):
    """A pass of one layer; the cache, and the record if there is one."""
    cache = HybridCache.create(SPEC, 1, 8) if cache is None else cache
    batch = ForwardBatch.create(mode, cache, ROWS, ROWS + 1, width=1)
    record = backend.init_record(batch)
    _, cache, record = backend.forward(3, jnp.zeros(()), cache, record, batch)
    return cache, record


ROUTES = {
    ForwardMode.EXTEND: ("prefill", "prefill"),
    ForwardMode.DRAFT_EXTEND: ("prefill", "prefill"),
    ForwardMode.DECODE: ("decode", "decode"),
    ForwardMode.IDLE: ("decode", "decode"),
    ForwardMode.TARGET_VERIFY: ("decode", "prefill"),
}


@pytest.mark.parametrize("mode", list(ForwardMode))
@pytest.mark.parametrize(("column", "speculative_mode"), [(0, SpeculativeMode.DECODE), (1, SpeculativeMode.PREFILL)])
def test_every_mode_reaches_its_child(mode, column, speculative_mode):
    children = {"prefill": Child(), "decode": Child()}
    backend = HybridAttnBackend.create(**children, speculative_mode=speculative_mode)
    expected = children.pop(ROUTES[mode][column])
    (other,) = children.values()
    assert backend.select(mode) is expected
    one_pass(backend, mode)
    assert expected.reached == [("init_record", mode), ("forward", 3, mode)]
    assert other.reached == []


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE])
@pytest.mark.parametrize("speculative_mode", list(SpeculativeMode))
def test_the_commit_reaches_the_child_that_ran_the_pass(mode, speculative_mode):
    backend = HybridAttnBackend.create(Child(), Child(), speculative_mode)
    cache, record = one_pass(backend, mode)
    ran = record.spec.backend
    arguments = [jnp.array([value], jnp.int32) for value in (5, 6, 7)]
    assert backend.update_mamba_state_after_mtp_verify(cache, record, *arguments) is cache
    (commit,) = ran.reached[2:]
    assert commit[0] == "commit"
    assert all(given is passed for given, passed in zip(arguments, commit[1:], strict=True))
    (other,) = {backend.prefill, backend.decode} - {ran}
    assert other.reached == []


def test_changing_the_selector_moves_verify_and_commit_together():
    class Swapped(HybridAttnBackend):
        def select(self, mode):
            return self.prefill if mode is ForwardMode.TARGET_VERIFY else super().select(mode)

    backend = Swapped.create(Child(), Child(), SpeculativeMode.DECODE)
    backend.update_mamba_state_after_mtp_verify(*one_pass(backend, ForwardMode.TARGET_VERIFY), ROWS)
    assert [name for name, *_ in backend.prefill.reached] == ["init_record", "forward", "commit"]
    assert backend.decode.reached == []
    with pytest.raises(TypeError, match="the prefill child, NoCommit, verifies but has no update_mamba_state"):
        Swapped.create(NoCommit(), Child(), SpeculativeMode.DECODE)


@pytest.mark.parametrize(
    ("child", "message"),
    [
        (NoCommit(), "verifies but has no update_mamba_state_after_mtp_verify: it could never commit"),
        (Attribute(), "verifies but has no update_mamba_state_after_mtp_verify: it could never commit"),
        (AnythingGoes(), r"has update_mamba_state_after_mtp_verify\(args, kwargs\), expected \(cache, record, last"),
        (
            TwoArguments(),
            r"\(cache, last_correct_step_indices\), expected \(cache, record, last_correct_step_indices, ",
        ),
    ],
)
def test_a_child_that_could_not_commit_is_refused_when_built(child, message):
    name = type(child).__name__
    with pytest.raises(TypeError, match=f"the decode child, {name}, .*{message}"):
        HybridAttnBackend.create(Child(), child, SpeculativeMode.DECODE)
    with pytest.raises(TypeError, match=f"the prefill child, {name}, .*{message}"):
        HybridAttnBackend.create(child, Child(), SpeculativeMode.PREFILL)
    # Under PREFILL the decode child still decodes, and commits that.
    with pytest.raises(TypeError, match=f"the decode child, {name}, .*{message}"):
        HybridAttnBackend.create(Child(), child, SpeculativeMode.PREFILL)
    # A prefill child that never verifies has nothing to commit.
    HybridAttnBackend.create(child, Child(), SpeculativeMode.DECODE)


def test_children_on_different_pools_are_refused():
    other = dataclasses.replace(SPEC, state=2)
    with pytest.raises(TypeError, match=r"must share one PoolSpec.* prefill has PoolSpec\(.*state=1.*decode .*state=2"):
        HybridAttnBackend.create(Child(), Child(other))
    assert HybridAttnBackend.create(Child(other), Child(other)).pool_spec is other


@pytest.mark.parametrize("missing", ["pool_spec", "init_record", "forward"])
def test_a_child_that_is_no_backend_is_refused(missing):
    class Half:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return getattr(complete, name)

    complete = Child()
    with pytest.raises(TypeError, match=f"the prefill child, Half, has no {missing}"):
        HybridAttnBackend.create(Half(), Child())
    with pytest.raises(TypeError, match=f"the decode child, Half, has no {missing}"):
        HybridAttnBackend.create(Child(), Half())


# From here on with the real children.


def hybrid(speculative_mode=SpeculativeMode.DECODE, strategy=CommitStrategy.SNAPSHOT):
    chunked, step = (make_backend(strategy, form) for form in (SpeculativeMode.PREFILL, SpeculativeMode.DECODE))
    return HybridAttnBackend.create(chunked, step, speculative_mode)


@functools.partial(jax.jit, static_argnames="backend")
def verify(backend, cache, weights, inputs):
    slots = jnp.arange(2, dtype=jnp.int32)
    batch = ForwardBatch.create(ForwardMode.TARGET_VERIFY, cache, slots, slots + 3, width=4)
    record = backend.init_record(batch)
    mixed = Mamba2Inputs(inputs[0][0], inputs[1][0], weights[0])
    _, cache, record = backend.forward(0, mixed, cache, record, batch)
    return cache, record


def verified(backend):
    weights, inputs = make_weights(backend.decode), make_inputs(backend.decode, 2, 4)
    return verify(backend, HybridCache.create(backend.pool_spec, 3, 8), weights, inputs)


STEPS = jnp.array([2, 0], jnp.int32)


def test_the_backend_is_static_a_tree_without_leaves_and_an_argument_of_jit():
    one, same, other = hybrid(), hybrid(), hybrid(SpeculativeMode.PREFILL)
    assert (one, hash(one)) == (same, hash(same))
    assert one != other
    assert jax.tree.leaves(one) == []
    assert jax.tree.unflatten(jax.tree.structure(one), []) == one

    traces = []

    def commit(backend, cache, record, steps):
        traces.append(backend.speculative_mode)
        return backend.update_mamba_state_after_mtp_verify(cache, record, steps)

    as_static, as_argument = jax.jit(commit, static_argnums=0), jax.jit(commit)
    cache, record = verified(one)
    for jitted in (as_static, as_argument):
        for backend in (one, same):
            assert not jitted(backend, cache, record, STEPS).awaiting_commit
    assert traces == [SpeculativeMode.DECODE] * 2, "equal backends share a trace"
    as_argument(other, *verified(other), STEPS)
    assert traces[-1] is SpeculativeMode.PREFILL


MAKERS = {
    "the other child": (
        hybrid(SpeculativeMode.DECODE),
        hybrid(SpeculativeMode.PREFILL),
        r"\(DECODE form, SNAPSHOT\) in TARGET_VERIFY with SNAPSHOT.*belongs to \S+\(PREFILL form, SNAPSHOT\)",
    ),
    "the other mode": (
        hybrid(SpeculativeMode.PREFILL),
        hybrid(SpeculativeMode.DECODE),
        r"\(PREFILL form, SNAPSHOT\) in TARGET_VERIFY with SNAPSHOT.*belongs to \S+\(DECODE form, SNAPSHOT\)",
    ),
    "the other strategy": (
        hybrid(strategy=CommitStrategy.REPLAY),
        hybrid(strategy=CommitStrategy.SNAPSHOT),
        r"\(DECODE form, REPLAY\) in TARGET_VERIFY with REPLAY.*belongs to \S+\(DECODE form, SNAPSHOT\).*with SNAPSHOT",
    ),
}


@pytest.mark.parametrize("case", list(MAKERS))
def test_a_record_of_another_maker_is_refused_while_tracing(case):
    maker, committer, message = MAKERS[case]
    cache, record = verified(maker)
    commit = committer.update_mamba_state_after_mtp_verify
    with pytest.raises(ValueError, match=f"this record was made by HybridLinearAttnBackend{message}"):
        jax.eval_shape(commit, cache, record, STEPS)


def test_the_real_selector_moves_verify_and_commit_together(monkeypatch):
    """The chunked child verifies and commits once the one branch says so, whatever `speculative_mode` is."""
    expected_backend = hybrid(SpeculativeMode.PREFILL)
    expected = jax.jit(expected_backend.update_mamba_state_after_mtp_verify)(*verified(expected_backend), STEPS)
    monkeypatch.setattr(HybridAttnBackend, "select", lambda self, mode: self.prefill)
    backend = hybrid(SpeculativeMode.DECODE)
    verify.clear_cache()
    cache, record = verified(backend)
    assert record.spec.backend == backend.prefill
    committed = jax.jit(backend.update_mamba_state_after_mtp_verify)(cache, record, STEPS)
    jax.tree.map(assert_same_bits, committed.mamba, expected.mamba)
    verify.clear_cache()
