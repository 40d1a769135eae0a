"""The ways to run an op that every test of its values goes through, all on a CPU."""

import contextlib

import jax
import pytest

from pallas_kernels import compat, dispatch
from tests.pallas_kernels import oracle

RUNS = {
    "xla": {},
    "xla-off-cpu": {},  # the gather-and-scatter form, which GPUs without a kernel take
    "triton": {"implementation": "triton", "interpret": True},
    "mosaic_gpu": {"implementation": "mosaic_gpu", "interpret": True},
}

# Hypothesis examples for each: a Mosaic GPU kernel takes seconds where the others take milliseconds.
EXAMPLES = {"xla": 12, "xla-off-cpu": 12, "triton": 12, "mosaic_gpu": 3}

no_interpreter = pytest.mark.skipif(
    compat.mosaic_interpreter() is None, reason="interpreting Mosaic GPU needs jax 0.11"
)
every_run = pytest.mark.parametrize(
    "run", ["xla", "xla-off-cpu", "triton", pytest.param("mosaic_gpu", marks=no_interpreter)]
)


def filler(run):
    """What fills arrays: any bits; where GPU code runs on a CPU, only what XLA's CPU compiler moves unchanged."""
    return oracle.random_bytes if run == "xla" else oracle.random_values


def jitted(op, run, donate=(0,), **static):
    """The op under jit with the run's options; traced as on a T4 for the form that GPUs without a kernel take."""

    def call(*args, **arrays):
        with contextlib.ExitStack() as stack:
            if run == "xla-off-cpu":
                patch = stack.enter_context(pytest.MonkeyPatch.context())
                patch.setattr(dispatch, "target", lambda: dispatch.Device("gpu", "Tesla T4", (7, 5)))
            return op(*args, **arrays, **static, **RUNS[run])

    # Only `xla` is what a CPU runs; the others are made to run here, and optimising that takes longer than it saves.
    options = None if run == "xla" else {"xla_backend_optimization_level": 0}
    return jax.jit(call, donate_argnums=donate, compiler_options=options)
