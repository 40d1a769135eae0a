"""Arguments of the op shaped as published models have them; checks and benchmarks share these."""

from typing import Any

import jax

from pallas_kernels.state_commit.shapes import SHAPES, CommitShape
from pallas_kernels.state_commit.shapes import arguments as commit_arguments

__all__ = ["SHAPES", "arguments"]


def arguments(shape: CommitShape, slots: int, batch: int, steps: int, *, tracked: bool = True) -> dict[str, Any]:
    """Abstract keyword arguments of `state_scatter`: the SSM states, and the conv windows stored one a node."""
    given: dict[str, Any] = commit_arguments(shape, slots, batch, steps, tracked=tracked)
    ssm, conv, states = given.pop("ssm"), given.pop("conv"), given.pop("ssm_states")
    del given["conv_inputs"]
    windows = jax.ShapeDtypeStruct((*states.shape[:3], *conv.shape[2:]), conv.dtype)
    return {"dst": {"ssm": ssm, "conv": conv}, "src": {"ssm": states, "conv": windows}} | given
