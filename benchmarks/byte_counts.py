"""Bytes of device memory that the Triton kernels move at published shapes, counted: see `accesses.py`.

One row and one layer at a time: what a row moves is linear in the length of its history, so two lengths, and a pass
that folds, give every steady state. Arrays that are read once a launch (A, D, indices) are left out; the ring's order,
of which a row reads as many numbers as it has inputs, is not.
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.accesses import Kernel, count_accesses
from benchmarks.byte_model import ring_length, steady_state
from benchmarks.published import Mamba2, Model
from pallas_kernels import decode_attention, state_commit
from pallas_kernels.decode_attention import shapes as attention_shapes
from pallas_kernels.ring import Ring
from pallas_kernels.state_commit import shapes as commit_shapes

_ONCE_A_LAUNCH = {
    "indices", "slots", "steps", "lengths", "num_tokens", "fold", "ring.starts", "ring.counts",
    "A", "D", "weight", "bias",
}  # fmt: skip
_DTYPES = {4: jnp.float32, 2: jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Counted:
    """Bytes of a row and layer; issued: every access; distinct: every address once a kernel."""

    distinct: float
    issued: float

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(self.distinct + other.distinct, self.issued + other.issued)

    def times(self, factor: float) -> "Counted":
        """Every byte `factor` times."""
        return Counted(self.distinct * factor, self.issued * factor)


def recurrence(model: Model, strategy: str, tokens: int, itemsize: int) -> Counted:
    """The verify pass of one recurrent layer on a chain, in the step form, and after snapshots the commit's state."""
    layer, length = model.recurrence, ring_length(tokens)
    if strategy == "snapshot":
        verify = _verify(layer, tokens, itemsize, "snapshots", 0, False, 0)
        return verify + commit(model, tokens, itemsize, conv=False)
    steady = steady_state(tokens, length)
    one, two, folding = (
        _verify(layer, tokens, itemsize, "ring", *run, length) for run in ((1, False), (2, False), (1, True))
    )
    token, fold = two + one.times(-1), folding + one.times(-1)
    return one + token.times(steady.history - 1) + fold.times(steady.folds)


def commit(model: Model, tokens: int, itemsize: int, *, ssm: bool = True, conv: bool = True) -> Counted:
    """`state_commit` of one row and layer, of the state, of the window or of both."""
    state = (model.recurrence.state_size,)
    shape = commit_shapes.CommitShape(1, state, model.channels, model.conv_width, _DTYPES[itemsize])
    given: dict[str, Any] = commit_shapes.arguments(shape, 2, 1, tokens, tracked=False)
    given |= {"slots": _int32(1), "steps": _int32(round(steady_state(tokens, ring_length(tokens)).accepted) - 1)}
    if not ssm:
        given |= {"ssm": None, "ssm_states": None}
    if not conv:
        given |= {"conv": None, "conv_inputs": None}
    return _total(count_accesses(functools.partial(state_commit, implementation="triton"), given))


def attention(model: Model, tokens: int, context: int, max_len: int) -> Counted:
    """`decode_attention` of one row alone."""
    given: dict[str, Any] = attention_shapes.arguments(model.attention, 1, max_len, 1, tokens)
    given |= {"slots": _int32(0), "lengths": _int32(context), "num_tokens": _int32(tokens)}
    return _total(count_accesses(functools.partial(decode_attention, scale=1.0, implementation="triton"), given))


def convolution(model: Model, tokens: int) -> Counted:
    """The convolution's pass, and its half of the commit."""
    op = importlib.import_module("pallas_kernels.causal_conv1d_update")
    shapes = importlib.import_module("pallas_kernels.causal_conv1d_update.shapes")
    given = shapes.arguments(shapes.ConvShape(1, model.channels, model.conv_width), 2, 1, tokens, record=True)
    given["slots"] = _int32(1)
    call = functools.partial(op.causal_conv1d_update, layer=0, implementation="triton")
    return _total(count_accesses(call, given)) + commit(model, tokens, 2, ssm=False)


@functools.cache
def _verify(layer: Any, tokens: int, itemsize: int, keep: str, count: int, fold: bool, length: int) -> Counted:
    op = getattr(importlib.import_module(f"pallas_kernels.{layer.op}"), layer.op)
    shapes = importlib.import_module(f"pallas_kernels.{layer.op}.shapes")
    sizes = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer) if field.name != "op"}
    shape = shapes.SSMShape if isinstance(layer, Mamba2) else shapes.DeltaShape
    given = shapes.arguments(
        shape(layers=1, state_dtype=_DTYPES[itemsize], **sizes), 2, 1, tokens, keep=keep, length=length
    )
    given["slots"] = _int32(1)
    if "num_tokens" in given:
        given["num_tokens"] = _int32(tokens)
    if keep == "ring":
        order = np.tile(np.arange(length, dtype=np.int32), (2, 1))
        given["ring"] = Ring(given["ring"].inputs, _int32(0, 0), _int32(0, count), order)
        given["fold"] = np.array([fold])
    return _total(count_accesses(functools.partial(op, layer=0, implementation="triton"), given))


def _total(kernels: list[Kernel]) -> Counted:
    ways = [
        way
        for kernel in kernels
        for name, array in kernel.arrays.items()
        if name not in _ONCE_A_LAUNCH
        for way in (array.read, array.written)
    ]
    return Counted(sum(way.distinct for way in ways), sum(way.issued for way in ways))


def _int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)
