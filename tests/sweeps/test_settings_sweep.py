"""Every drafter, greedy and sampled, under every setting of jax that a caller may have: tokens are the same.

Not collected by default: `pytest tests/sweeps/test_settings_sweep.py`. One process for each drafter, with two devices.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback

import jax
import pytest
from jax.sharding import AxisType

from tests.mamba_spec_jax.generations import DRAFTERS, METHODS, generation


@contextlib.contextmanager
def options(**values):
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def mesh(axis_type):
    return jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(axis_type,)))


# A context for each, and how many tokens are generated: without jit a step takes tens of seconds.
SETTINGS = {
    "x64": (lambda: options(jax_enable_x64=True), 8),
    "x64, dtypes promoted": (lambda: options(jax_enable_x64=True, jax_numpy_dtype_promotion="standard"), 8),
    "dtypes promoted": (lambda: options(jax_numpy_dtype_promotion="standard"), 8),
    "ranks never promoted": (lambda: options(jax_numpy_rank_promotion="raise"), 8),
    "debug_nans": (lambda: options(jax_debug_nans=True), 8),
    "debug_infs": (lambda: options(jax_debug_infs=True), 8),
    "disable_jit": (lambda: jax.disable_jit(), 2),
    "a mesh with Auto axes": (lambda: mesh(AxisType.Auto), 8),
    "a mesh with Explicit axes": (lambda: mesh(AxisType.Explicit), 8),
    "another default device": (lambda: jax.default_device(jax.devices()[1]), 8),
    "rbg keys": (lambda: options(jax_default_prng_impl="rbg"), 8),
    "threefry, not partitionable": (lambda: options(jax_threefry_partitionable=False), 8),
    "highest precision of products": (lambda: options(jax_default_matmul_precision="highest"), 8),
    "bfloat16 products": (lambda: options(jax_default_matmul_precision="bfloat16"), 8),
    "no compile cache": (lambda: options(jax_enable_compilation_cache=False), 8),
}  # fmt: skip


def outcome(drafter, method, setting, new, plain):
    try:
        with setting():
            found = generation(drafter, method, new)
    except Exception:
        return traceback.format_exc(limit=-3)
    return "same" if found == [row[:new] for row in plain] else f"{found}, expected {plain}"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same(drafter):
    settings = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "tests.sweeps.test_settings_sweep", drafter]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    found = json.loads(done.stdout)
    assert len(found) == len(METHODS) * len(SETTINGS)
    assert set(found.values()) == {"same"}, json.dumps({name: text for name, text in found.items() if text != "same"})


if __name__ == "__main__":
    drafter = sys.argv[1]
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    results = {}
    for method in METHODS:
        plain = generation(drafter, method)
        for name, (setting, new) in SETTINGS.items():
            results[f"{method}, {name}"] = outcome(drafter, method, setting, new, plain)
            print(drafter, method, name, results[f"{method}, {name}"][-300:], file=sys.stderr, flush=True)
    print(json.dumps(results))
