"""Settings of every test run: one CPU, the same examples every time, no implicit promotion between dtypes."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

# Deterministic, and no deadline: an example's first run compiles.
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("tests")

jax.config.update("jax_numpy_dtype_promotion", "strict")


MOST_PROCESSES = 4  # each holds a compiler and its programs: one to two GB
# Files that take longest start first, so that no process works on one of them while the others have nothing left.
LONGEST_FIRST = (
    "test_drafters.py",
    "test_lossless.py",
    "test_goldens.py",
    "test_quickstart.py",
    "test_recurrent_exactness.py",
    "test_whole_step.py",
    "test_state_commit.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One process a core; none but pytest's own where all tests are those of one file."""
    named = {argument.split("::")[0] for argument in config.option.file_or_dir}
    if len(named) == 1 and Path(*named).is_file():
        return 0
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that check logic rather than bits: optimising programs this small takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # or a module that checks bits might run what was compiled here
