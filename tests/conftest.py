"""Settings of every test run: one CPU, the same examples every time, no implicit promotion between dtypes."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

# Deterministic, and no deadline: an example's first run compiles.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("tests")

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that check logic rather than bits: optimising programs this small takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # or a module that checks bits might run what was compiled here
