"""A caller's settings of jax: every drafter's program is traced under each, and tokens are the same."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.generations import DRAFTERS, TARGET, generation, own_step, traced


@contextlib.contextmanager
def setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ranks_are_never_promoted(drafter):
    with setting("jax_numpy_rank_promotion", "raise"):
        traced(drafter, "sampled")


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_results_keep_their_dtypes_in_64_bit_mode(drafter):
    expected = [(leaf.shape, leaf.dtype) for leaf in traced(drafter, "sampled").out_avals]
    with setting("jax_enable_x64", True), setting("jax_numpy_dtype_promotion", "standard"):
        assert [(leaf.shape, leaf.dtype) for leaf in traced(drafter, "sampled").out_avals] == expected


@pytest.fixture(scope="module")
def plain():
    return generation("prompt lookup", "sampled")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", True),
        ("jax_numpy_rank_promotion", "raise"),
        ("jax_debug_nans", True),
        ("jax_default_prng_impl", "rbg"),
    ],
)
def test_tokens_are_the_same(plain, name, value):
    with setting(name, value):
        assert generation("prompt lookup", "sampled") == plain


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_tokens_are_the_same_under_a_mesh(plain, axis_type):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        assert generation("prompt lookup", "sampled") == plain


def test_a_users_own_step_under_shard_map():
    """With the default `check_vma`: the loops inside start from values that vary over the mesh as their results do."""
    params, cache = tiny.random_params(TARGET), TARGET.init_cache(2, 16)
    tokens = jnp.asarray([[3, 9, 4], [5, 1, 2]], jnp.int32)
    expected, expected_cache = jax.jit(own_step, static_argnums=0)(TARGET, params, tokens, cache)
    mesh, spec = jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec
    step = jax.shard_map(
        lambda params, tokens, cache: own_step(TARGET, params, tokens, cache),
        mesh=mesh,
        in_specs=(spec(), spec(), spec()),
        out_specs=spec(),
    )
    found, found_cache = jax.jit(step)(params, tokens, cache)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_cache.lengths, expected_cache.lengths)
