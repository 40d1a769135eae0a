"""A caller's settings of jax: every drafter's program is traced under each, and tokens are the same."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import pytest

from tests.mamba_spec_jax.generations import DRAFTERS, generation, traced
from tests.mamba_spec_jax.two_devices import CHECKS


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
        ("jax_threefry_partitionable", False),
    ],
)
def test_tokens_are_the_same(plain, name, value):
    with setting(name, value):
        assert generation("prompt lookup", "sampled") == plain


@pytest.fixture(scope="module")
def outcomes():
    """Of two_devices.py, by name; optimising programs this small takes longer than it saves."""
    settings = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "tests.mamba_spec_jax.two_devices"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_with_two_devices(outcomes, name):
    assert outcomes[name] == "same"
