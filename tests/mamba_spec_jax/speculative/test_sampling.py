"""Filters against a float64 oracle; draws that depend on (seed, position, purpose) and on nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mamba_spec_jax.speculative import sampling
from mamba_spec_jax.speculative.rows import seed_rows
from mamba_spec_jax.speculative.sampling import (
    Filters,
    Greedy,
    Purpose,
    Sampling,
    draw_keys,
    draw_tokens,
    draw_uniforms,
    filtered_log_probs,
)
from pallas_kernels import arithmetic

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB = 7
SEEDS = np.array([3, 0, 2**32 - 1, 77], np.uint32)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# On and off, in every combination.
filter_numbers = st.fixed_dictionaries(
    {
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.one_of(st.just(1.0), st.floats(0.05, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)


def filtered(logits, temperature, forbidden=None, **numbers):
    return filtered_log_probs(logits, temperature, Filters.create(len(logits), **numbers), forbidden)


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def oracle(numbers, logits, temperature, margin=1e-5):
    """One row in float64; None where rounding could decide which tokens stay."""
    log_probs = log_softmax(logits.astype(np.float64) / temperature)
    for rule, number in numbers.items():  # in the order of OFF
        probs = np.exp(log_probs)
        if number == OFF[rule]:
            continue
        if rule == "top_k":
            kept = np.array([(log_probs > value).sum() < number for value in log_probs])
        elif rule == "top_p":
            mass_above = np.array([probs[log_probs > value].sum() for value in log_probs])
            if np.any(np.abs(mass_above - number) < margin):
                return None
            kept = mass_above < number
        else:
            ratio = probs / probs.max()
            if np.any((np.abs(ratio - number) < margin) & (ratio < 1)):
                return None
            kept = ratio >= number
        with np.errstate(divide="ignore"):
            log_probs = log_softmax(np.where(kept, log_probs, -np.inf))
    return log_probs


@given(
    # A grid of logits makes ties common, and equal logits tie exactly in float32.
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    numbers=filter_numbers,
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_filters_match_float64_oracle(logits, temperature, numbers):
    logits = np.array(logits)
    expected = oracle(numbers, logits, temperature)
    assume(expected is not None)
    got = filtered(jnp.asarray(logits[None], jnp.float32), jnp.full((1,), temperature), **numbers)[0]
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    kept = ~np.isneginf(expected)
    np.testing.assert_allclose(np.asarray(got)[kept], expected[kept], atol=2e-5)


def test_filters_apply_in_the_order_of_transformers():
    """Top-k, top-p, min-p: 0.72 needs three of the four tokens, but two of the renormalised top three."""
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]] * 3))
    got = filtered(logits, jnp.ones(3), top_k=[0, 3, 3], top_p=0.72, min_p=[0, 0, 0.8])
    np.testing.assert_array_equal(
        jnp.isfinite(got), [[True, True, True, False], [True, True, False, False], [True, False, False, False]]
    )


@pytest.mark.parametrize("nodes", [(), (3,)])
def test_rows_are_filtered_by_their_own_numbers_and_off_changes_no_bit(nodes):
    """A batch of every combination equals each row alone, and the row without filters the call without filters."""
    rows = [{**OFF, **on} for on in ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.8})]
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(len(rows), *nodes, 40)), jnp.float32)
    warm = jnp.full(len(rows), 0.7)
    together = filtered(logits, warm, **{name: [row[name] for row in rows] for name in OFF})
    for at, row in enumerate(rows):
        np.testing.assert_array_equal(filtered(logits[at : at + 1], warm[:1], **row)[0], together[at])
    np.testing.assert_array_equal(filtered_log_probs(logits, warm)[0], together[0])
    assert not np.array_equal(filtered_log_probs(logits, warm)[1], together[1])


def test_the_accelerators_loop_finds_what_the_cpus_does():
    """Without a data-dependent end: a GPU always makes all its passes."""
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 300)), jnp.float32)
    numbers = {"top_k": [0, 7, 0, 40], "top_p": [1.0, 1.0, 0.4, 0.9]}
    expected = filtered(logits, jnp.ones(4), **numbers)
    sampling._lowest_kept.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", lambda *operands, cpu, default: default(*operands))
        got = filtered(logits, jnp.ones(4), **numbers)
    sampling._lowest_kept.clear_cache()
    np.testing.assert_array_equal(got, expected)


def test_ties_at_the_threshold_all_stay():
    logits = jnp.array([[1.0, 2.0, 1.0, 2.0, 1.0]])
    for rule, number, kept in (
        ("top_k", 1, [0, 1, 0, 1, 0]),
        ("top_k", 3, [1] * 5),
        ("top_p", 0.3, [0, 1, 0, 1, 0]),
        ("min_p", 1, [0, 1, 0, 1, 0]),
    ):
        got = filtered(logits, jnp.ones(1), **{rule: number})
        np.testing.assert_array_equal(jnp.isfinite(got)[0], np.array(kept, bool), err_msg=rule)


def test_whole_mass_keeps_the_vanishing_tail():
    logits = jnp.array([[0.0, *([-30.0] * 20)]])
    for numbers in ({"top_p": 1}, {"min_p": 0}, {"top_k": 1000}):
        assert jnp.all(jnp.isfinite(filtered(logits, jnp.ones((1,)), **numbers))), numbers


def test_numbers_outside_their_range_cannot_drop_every_token():
    """Inside jit nobody checks them."""
    filters = Filters(jnp.array([-5, 2**30]), jnp.array([-1.0, 0.0]), jnp.array([7.0, -1.0]))
    got = filtered_log_probs(jnp.array([[0.0, 3.0, 1.0]] * 2), jnp.ones(2), filters)
    np.testing.assert_array_equal(jnp.isfinite(got), [[False, True, False]] * 2)


def test_temperature_zero_is_the_lowest_argmax():
    logits = jnp.array([[0.0, 3.0, 3.0, 1.0]] * 4)
    temperature = jnp.array([0.0, -1.0, 1e-30, 1.0])
    got = np.asarray(filtered(logits, temperature, top_k=3))
    greedy = np.array([-np.inf, 0.0, -np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(got[:2], [greedy, greedy])
    # However small, a temperature above 0 shares the mass between tied tokens.
    np.testing.assert_allclose(np.exp(got[2]), [0, 0.5, 0.5, 0], atol=1e-6)
    assert np.isfinite(got[3]).sum() == 3


def test_forbidden_tokens_go_before_the_filters():
    logits = jnp.array([[5.0, 1.0, 0.0, -1.0]] * 2)
    forbidden = jnp.array([[True, False, False, False]] * 2)
    got = filtered(logits, jnp.array([1.0, 0.0]), forbidden, top_k=2)
    np.testing.assert_array_equal(jnp.isfinite(got), [[False, True, True, False], [False, True, False, False]])


def test_half_precision_logits_are_filtered_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.bfloat16)
    temperature = jnp.array([0.7, 0.0])
    got, expected = jax.jit(
        lambda logits: [filtered(x, temperature, top_k=5, top_p=0.9) for x in (logits, logits.astype(jnp.float32))]
    )(logits)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"top_k": -3}, "top_k is -3, expected finite values of at least 0"),
        ({"top_k": 2.5}, "top_k is 2.5, expected an integer or 2 of them"),
        ({"top_k": True}, "top_k is True, expected an integer"),
        ({"top_k": [1, 2, 3]}, r"top_k has shape \[3\], expected one value or 2"),
        ({"top_p": 0}, "top_p is 0, expected numbers above 0"),
        ({"top_p": 1.5}, "top_p is 1.5, expected at most 1"),
        ({"top_p": "0.9"}, "top_p is '0.9', expected a number"),
        ({"top_p": float("nan")}, "top_p is nan, expected finite"),
        ({"min_p": -0.1}, "min_p is -0.1, expected finite values of at least 0"),
        ({"min_p": [0, 2]}, r"min_p is \[0, 2\], expected at most 1"),
        ({"min_p": None}, "min_p is None, expected a number"),
        ({"min_p": [[0.1], []]}, "min_p is .*, expected a number"),
    ],
)
def test_invalid_numbers_are_named(numbers, message):
    with pytest.raises(ValueError, match=message):
        Filters.create(2, **numbers)


@pytest.mark.parametrize("seed", [7, np.int64(7), np.uint8(7)])
def test_a_single_seed_is_counted_up_whatever_integer_it_is(seed):
    assert seed_rows(seed, 3).tolist() == [7, 8, 9]
    assert seed_rows([2**32 - 1, seed, np.int32(5)], 3).tolist() == [2**32 - 1, 7, 5]


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (-1, r"seeds is -1 \(counted up to 1 in 3 rows\), expected 0..4294967295"),
        (2**32 - 2, r"seeds is 4294967294 \(counted up to 4294967296 in 3 rows\), expected 0..4294967295"),
        ([0, 2**32, 1], r"seeds is \[0, 4294967296, 1\], expected 0..4294967295"),
        ([0, -1, 1], r"seeds is \[0, -1, 1\], expected 0..4294967295"),
        (True, "seeds is True, expected an integer or 3 of them"),
        ([0, 1.0, 2], r"seeds is \[0, 1.0, 2\], expected an integer or 3 of them"),
        (None, "seeds is None, expected an integer"),
    ],
)
def test_seeds_that_are_none_are_named(seeds, message):
    with pytest.raises(ValueError, match=message):
        seed_rows(seeds, 3)


def test_methods_are_hashable_values():
    assert hash(Sampling()) == hash(Sampling())
    assert Greedy() == Greedy() != Sampling() == Sampling()


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


def test_log_probs_do_not_depend_on_the_row():
    """XLA's CPU logarithm of the last of 15 sums had other bits."""
    draws = np.random.default_rng(0)
    for row in draws.normal(0, 3, (6, 1, 1031)).astype(np.float32):
        for rows in (3, 15, 20):
            found = np.asarray(jax.jit(arithmetic.log_softmax)(np.repeat(row, rows, axis=0)))
            np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))
        np.testing.assert_allclose(found[0], np.asarray(jax.nn.log_softmax(row[0])), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("partitionable", [True, False])
def test_draws_are_those_of_jax_by_default_whatever_its_settings_are(partitionable):
    keys = sampling.draw_keys(seed_rows([3, 2**31 + 5], 2), jnp.array([[0, 7, 99], [1, 2, 10**6]]), Purpose.ACCEPT)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.ravel())
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (5,), jnp.float32, mode="low"))(keys.ravel())
    with jax.threefry_partitionable(partitionable):
        np.testing.assert_array_equal(sampling.draw_uniforms(keys).ravel(), uniforms)
        np.testing.assert_array_equal(sampling.perturbed(keys, jnp.zeros((2, 3, 5))).reshape(-1, 5), noise)
