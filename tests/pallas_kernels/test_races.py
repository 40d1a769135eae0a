"""Of what a Triton kernel updates in place, no warp and no program reads what another may be writing.

The interpreter runs one program after the other, and so sees no race: what is checked is the kernel that is traced.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import causal_conv1d_update, fold_history, gated_delta_update, selective_state_update, state_commit
from pallas_kernels.causal_conv1d_update import shapes as conv_shapes
from pallas_kernels.gated_delta_update import fold_history as fold_delta
from pallas_kernels.gated_delta_update import shapes as delta_shapes
from pallas_kernels.launch import THREADS
from pallas_kernels.selective_state_update import shapes as ssm_shapes
from pallas_kernels.state_commit import shapes as commit_shapes

S, B, T, Q = 5, 2, 3, 8
KEEPS = ("state", "snapshots", "ring", "fold")
FORMS = ("step", "chunk")
# Rows and columns of a state: as few as fill a block, which then needs no mask for its size.
SIZES = {"step": (4, 8), "chunk": (16, 16)}


class Access(NamedTuple):
    """One load or store: what it reads or writes, how many elements, and whether some of them may be left out."""

    target: Any
    store: bool
    elements: int
    guarded: bool


def accesses(jaxpr, refs, guarded=False):
    """Every load and store of a kernel; refs: what its variables stand for."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("masked_load", "masked_swap"):
            target, *_ = leaves = equation.params["args_tree"].unflatten(equation.invars)
            # (ref, indices, mask, other) and (ref, indices, value, mask)
            mask, value = (leaves[3], leaves[2]) if name == "masked_swap" else (leaves[2], equation.outvars[0])
            yield Access(refs.get(target), name == "masked_swap", value.aval.size, guarded or mask is not None)
        for inner, operands in inner_jaxprs(equation):
            known = {
                var: refs[given] for var, given in zip(inner.invars, operands, strict=True) if is_known(given, refs)
            }
            yield from accesses(inner, known, guarded or name == "cond")


def is_known(variable, refs):
    return isinstance(variable, jax.extend.core.Var) and variable in refs


def inner_jaxprs(equation):
    """The jaxprs that an equation runs, each with the variables it is given."""
    params, given = equation.params, equation.invars
    match equation.primitive.name:
        case "cond":
            return [(branch.jaxpr, given[1:]) for branch in params["branches"]]
        case "while":
            tests, body = params["cond_nconsts"], params["body_nconsts"]
            return [(params["body_jaxpr"].jaxpr, given[tests:])] if body or len(given) > tests else []
        case _:
            inner = params.get("jaxpr")
            return [] if inner is None else [(getattr(inner, "jaxpr", inner), given)]


def launches(jaxpr):
    """Every launch of a traced function."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner, _ in inner_jaxprs(equation):
                yield from launches(inner)


def traced(function, arguments, updated):
    """The warps of the one launch, and the accesses to what it updates: arrays of the shapes `updated`."""
    closed = jax.make_jaxpr(lambda given: function(**given, implementation="triton", interpret=True))(arguments)
    (launch,) = launches(closed.jaxpr)
    kernel = launch.params["jaxpr"]
    found = accesses(kernel, {var: var.aval.shape for var in kernel.invars})
    return launch.params["compiler_params"].num_warps, [access for access in found if access.target in updated]


def recurrence(op, keep, form, state_dtype="float32"):
    rows, columns = SIZES[form]
    shapes: Any
    update: Any
    fold: Any
    shape: Any
    if op == "ssm":
        shapes, update, fold = ssm_shapes, selective_state_update, fold_history
        shape = ssm_shapes.SSMShape(layers=2, heads=2, head_dim=rows, state=columns, groups=1)
    else:
        shapes, update, fold = delta_shapes, gated_delta_update, fold_delta
        shape = delta_shapes.DeltaShape(2, 1, 2, rows, columns, per_channel=op == "kda")
    shape = dataclasses.replace(shape, state_dtype=jnp.dtype(state_dtype))
    kept = "ring" if keep == "fold" else keep
    given = shapes.arguments(shape, S, B, T, keep=kept, length=Q)
    if keep == "fold":
        given = {name: given[name] for name in ("state", "ring", "A", "slots") if name in given}
        update = fold
    return traced(functools.partial(update, layer=1, form=form), given, [given["state"].shape])


def commits():
    shape = commit_shapes.CommitShape(2, (3,), channels=5, conv_width=4, ssm_dtype=jnp.int8, conv_dtype=jnp.float16)
    given = commit_shapes.arguments(shape, S, B, T, tree=True)
    return traced(state_commit, given, [given["conv"].shape])


def convolutions():
    given = conv_shapes.arguments(conv_shapes.ConvShape(layers=2, channels=5), S, B, T)
    return traced(functools.partial(causal_conv1d_update, layer=1), given, [given["conv_state"].shape])


RECURRENT = [(op, keep, form) for op in ("ssm", "gdn", "kda") for keep in KEEPS for form in FORMS]
NAMES = ["-".join(case) for case in RECURRENT]


def check_owners(warps, found):
    """Else a warp may store an element before another that holds it too has loaded it."""
    assert any(access.store for access in found)
    assert not [access for access in found if warps > 1 and access.elements < THREADS * warps]


@pytest.mark.parametrize(("op", "keep", "form"), RECURRENT, ids=NAMES)
def test_no_thread_reads_a_state_that_another_writes(op, keep, form):
    """A row without a slot has index 0 for one, where another program may be writing: its loads are masked."""
    warps, found = recurrence(op, keep, form)
    if keep != "snapshots":  # that pass leaves the pool alone
        check_owners(warps, found)
    loads = [access for access in found if not access.store]
    assert loads
    assert all(access.guarded for access in loads)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_every_element_of_a_halved_state_has_one_thread(state_dtype):
    check_owners(*recurrence("gdn", "ring", "step", state_dtype))


def test_every_channel_of_a_window_has_one_thread():
    check_owners(*commits())
    check_owners(*convolutions())
