"""Filters against a float64 oracle; draws that depend on (seed, position, purpose) and on nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mamba_spec_jax.speculative.sampling import (
    Greedy,
    MinP,
    Purpose,
    Sampling,
    TopK,
    TopP,
    draw_keys,
    draw_tokens,
    draw_uniforms,
    filtered_log_probs,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 7
SEEDS = np.array([3, 0, 2**32 - 1, 77], np.uint32)
filter_lists = st.lists(
    st.one_of(
        st.integers(1, VOCAB + 2).map(TopK),
        st.floats(0.05, 1).map(TopP),
        st.floats(0, 1).map(MinP),
    ),
    max_size=3,
)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def oracle(filters, logits, temperature, margin=1e-5):
    """One row in float64; None where rounding could decide which tokens stay."""
    log_probs = log_softmax(logits.astype(np.float64) / temperature)
    for rule in filters:
        probs = np.exp(log_probs)
        if isinstance(rule, TopK):
            kept = np.array([(log_probs > value).sum() < rule.k for value in log_probs])
        elif isinstance(rule, TopP):
            mass_above = np.array([probs[log_probs > value].sum() for value in log_probs])
            if rule.p < 1 and np.any(np.abs(mass_above - rule.p) < margin):
                return None
            kept = (mass_above < rule.p) | (rule.p == 1)
        else:
            ratio = probs / probs.max()
            if np.any((np.abs(ratio - rule.p) < margin) & (ratio < 1)):
                return None
            kept = ratio >= rule.p
        with np.errstate(divide="ignore"):
            log_probs = log_softmax(np.where(kept, log_probs, -np.inf))
    return log_probs


@given(
    # A grid of logits makes ties common, and equal logits tie exactly in float32.
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    filters=filter_lists,
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_filters_match_float64_oracle(logits, temperature, filters):
    logits = np.array(logits)
    expected = oracle(filters, logits, temperature)
    assume(expected is not None)
    got = filtered_log_probs(
        Sampling(tuple(filters)), jnp.asarray(logits[None], jnp.float32), jnp.full((1,), temperature)
    )[0]
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    kept = ~np.isneginf(expected)
    np.testing.assert_allclose(np.asarray(got)[kept], expected[kept], atol=2e-5)


def test_filters_apply_in_the_order_given():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    one = jnp.ones((1,))
    # On the full distribution 0.6 is reached by two tokens; on the renormalised top three, 0.4 / 0.9 + 0.3 / 0.9 too,
    # but 0.72 needs three of the former and two of the latter.
    first_p = filtered_log_probs(Sampling((TopP(0.72), TopK(3))), logits, one)
    first_k = filtered_log_probs(Sampling((TopK(3), TopP(0.72))), logits, one)
    np.testing.assert_array_equal(jnp.isfinite(first_p), [[True, True, True, False]])
    np.testing.assert_array_equal(jnp.isfinite(first_k), [[True, True, False, False]])


def test_ties_at_the_threshold_all_stay():
    logits = jnp.array([[1.0, 2.0, 1.0, 2.0, 1.0]])
    one = jnp.ones((1,))
    for rule, kept in (
        (TopK(1), [0, 1, 0, 1, 0]),
        (TopK(3), [1] * 5),
        (TopP(0.3), [0, 1, 0, 1, 0]),
        (MinP(1), [0, 1, 0, 1, 0]),
    ):
        got = filtered_log_probs(Sampling((rule,)), logits, one)
        np.testing.assert_array_equal(jnp.isfinite(got)[0], np.array(kept, bool), err_msg=str(rule))


def test_whole_mass_keeps_the_vanishing_tail():
    logits = jnp.array([[0.0, *([-30.0] * 20)]])
    for rule in (TopP(1), TopP(1.0), MinP(0), TopK(1000)):
        assert jnp.all(jnp.isfinite(filtered_log_probs(Sampling((rule,)), logits, jnp.ones((1,))))), rule


def test_temperature_zero_is_the_lowest_argmax():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0]] * 4)
    temperature = jnp.array([0.0, -1.0, 1e-30, 1.0])
    got = np.asarray(filtered_log_probs(Sampling((TopK(3),)), logits, temperature))
    greedy = np.array([-np.inf, 0.0, -np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(got[:2], [greedy, greedy])
    # However small, a temperature above 0 shares the mass between tied tokens.
    np.testing.assert_allclose(np.exp(got[2]), [0, 0.5, 0.5, 0], atol=1e-6)
    assert np.isfinite(got[3]).sum() == 3


def test_forbidden_tokens_go_before_the_filters():
    logits = jnp.array([[5.0, 1.0, 0.0, -1.0]] * 2)
    forbidden = jnp.array([[True, False, False, False]] * 2)
    got = filtered_log_probs(Sampling((TopK(2),)), logits, jnp.array([1.0, 0.0]), forbidden)
    np.testing.assert_array_equal(jnp.isfinite(got), [[False, True, True, False], [False, True, False, False]])


def test_half_precision_logits_are_filtered_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.bfloat16)
    temperature = jnp.array([0.7, 0.0])
    method = Sampling((TopK(5), TopP(0.9)))
    got, expected = jax.jit(
        lambda logits: [filtered_log_probs(method, x, temperature) for x in (logits, logits.astype(jnp.float32))]
    )(logits)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "TopK.k is 0"),
        (lambda: TopK(-3), "TopK.k is -3"),
        (lambda: TopK(2.5), "TopK.k is 2.5"),
        (lambda: TopK(True), "TopK.k is True"),
        (lambda: TopP(0), "TopP.p is 0"),
        (lambda: TopP(1.5), "TopP.p is 1.5"),
        (lambda: TopP("0.9"), "TopP.p is '0.9'"),
        (lambda: TopP(float("nan")), "TopP.p is nan"),
        (lambda: MinP(-0.1), "MinP.p is -0.1"),
        (lambda: MinP(2), "MinP.p is 2"),
        (lambda: Sampling(TopK(3)), r"Sampling.filters is TopK\(k=3\), expected a tuple"),
        (lambda: Sampling((0.9,)), r"Sampling.filters is \(0.9,\), expected a tuple"),
    ],
)
def test_invalid_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_methods_are_hashable_values():
    assert hash(Sampling((TopK(3), TopP(0.5)))) == hash(Sampling((TopK(3), TopP(0.5))))
    assert Sampling((TopK(3), TopP(0.5))) != Sampling((TopP(0.5), TopK(3)))
    assert Greedy() == Greedy() != Sampling()


@functools.partial(jax.jit, static_argnums=2)
def key_bits(seeds, positions, purpose):
    return jax.random.key_data(draw_keys(seeds, positions, purpose))


def test_keys_depend_on_seed_position_and_purpose_alone():
    positions = np.array([[5, 6, 7], [0, 1, 2], [100, 101, 102], [5, 6, 7]])
    keys = np.asarray(key_bits(SEEDS, positions, Purpose.TOKEN))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(key_bits(SEEDS[order], positions[order], Purpose.TOKEN), keys[order])
    np.testing.assert_array_equal(key_bits(SEEDS, positions[:, 2], Purpose.TOKEN), keys[:, 2])
    for row in range(4):
        alone = key_bits(SEEDS[row : row + 1], positions[row : row + 1, :1], Purpose.TOKEN)
        np.testing.assert_array_equal(alone[0, 0], keys[row, 0])
    everything = np.concatenate([key_bits(SEEDS, positions, purpose).reshape(-1, 2) for purpose in Purpose])
    assert len(np.unique(everything, axis=0)) == len(everything) == 3 * positions.size


def test_draws_ignore_the_default_generator():
    positions = np.arange(12).reshape(4, 3)

    def draws():
        keys = draw_keys(SEEDS, positions, Purpose.TOKEN)
        return draw_tokens(keys, jnp.zeros((4, 3, 9))), draw_uniforms(keys)

    expected = jax.jit(lambda: draws())()
    with jax.default_prng_impl("rbg"):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda: draws())(), expected)


def test_draws_follow_the_probabilities():
    """Chi-square at alpha 1e-3 with fixed seeds, over seeds and over positions; weights need not be normalised."""
    probs = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 50_000
    log_probs = jnp.log(jnp.asarray(7 * probs, jnp.float32))

    @jax.jit
    def draw(seeds, positions):
        tokens = draw_tokens(draw_keys(seeds, positions, Purpose.TOKEN), jnp.broadcast_to(log_probs, (count, 5)))
        return tokens, draw_uniforms(draw_keys(seeds, positions, Purpose.ACCEPT))

    counter, constant = np.arange(count), np.full(count, 11)
    along = {"seeds": (counter.astype(np.uint32), constant), "positions": (constant.astype(np.uint32), counter)}
    for name, (seeds, positions) in along.items():
        tokens, uniforms = map(np.asarray, draw(seeds, positions))
        observed = np.bincount(tokens, minlength=5)
        assert observed[1] == 0
        live = probs > 0
        assert scipy.stats.chisquare(observed[live], count * probs[live]).pvalue > 1e-3, name
        assert uniforms.min() >= 0
        assert uniforms.max() < 1
        assert scipy.stats.kstest(uniforms, "uniform").pvalue > 1e-3, name
