"""What gated_delta_update says of arguments that do not fit, and that it works in place on those that do."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_update import fold_history, gated_delta_update, shapes
from pallas_kernels.ring import Ring

SHAPE = shapes.DeltaShape(layers=2, key_heads=2, heads=4, value_dim=5, key_dim=6, dtype=jnp.float32)
SLOTS, BATCH, STEPS, LENGTH = 7, 3, 4, 9


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(keep="state", **changed):
    given = shapes.arguments(SHAPE, SLOTS, BATCH, STEPS, keep=keep, length=LENGTH)
    return given | changed


def ring_with(**leaves):
    ring = shapes.ring(SHAPE, SLOTS, LENGTH)
    return ring._replace(inputs=ring.inputs | leaves)


short = shapes.ring(SHAPE, SLOTS, 7)
REFUSED = {
    "state is int32, expected one of float32": arguments(state=struct(2, 7, 4, 5, 6, dtype=jnp.int32)),
    "state has shape [7, 4, 5, 6], expected [L, S, Hv, V, K]": arguments(state=struct(7, 4, 5, 6)),
    "layer is 2, expected an integer in 0..1": arguments(layer=2),
    "k has Hk = 3, expected a divisor of the 4 heads": arguments(k=struct(3, 4, 3, 6)),
    "q has shape [3, 4, 4, 6], expected [3, 4, 2, 6]": arguments(q=struct(3, 4, 4, 6)),
    "v has shape [3, 4, 4, 6], expected [3, 4, 4, 5]": arguments(v=struct(3, 4, 4, 6)),
    "g has shape [3, 4, 2], expected [3, 4, 4]": arguments(g=struct(3, 4, 2)),
    "g has shape [3, 4, 4, 5], expected [3, 4, 4, 6]": arguments(g=struct(3, 4, 4, 5)),
    "beta is bfloat16, expected float32; cast it": arguments(beta=struct(3, 4, 4, dtype=jnp.bfloat16)),
    "v is int32, expected a floating dtype": arguments(v=struct(3, 4, 4, 5, dtype=jnp.int32)),
    "slots has shape [2], expected [3]": arguments(slots=struct(2, dtype=jnp.int32)),
    "num_tokens is float32, expected int32": arguments(num_tokens=struct(3)),
    "form is 'scan', expected 'step' or 'chunk'": arguments(form="scan"),
    "snapshots is bfloat16, expected float32": arguments(snapshots=struct(2, 3, 4, 4, 5, 6, dtype=jnp.bfloat16)),
    "snapshots has shape [3, 4, 4, 5, 6], expected [2, 3, 4, 4, 5, 6]": arguments(snapshots=struct(3, 4, 4, 5, 6)),
    "snapshots and disable_state_update are given; expected one": arguments("snapshots", disable_state_update=True),
    "ring is None; pass ring and fold together": arguments(fold=struct(3, dtype=jnp.bool_)),
    "fold is int32, expected bool": arguments("ring", fold=struct(3, dtype=jnp.int32)),
    "the ring holds Q = 7 inputs, expected 2 T = 8 or more": arguments("ring", ring=short),
    "ring.inputs['k'] is bfloat16, expected float32: a history has k's bits": arguments(
        "ring", ring=ring_with(k=struct(2, 7, 9, 2, 6, dtype=jnp.bfloat16))
    ),
    "ring.inputs['g'] has shape [2, 7, 9, 4, 6], expected [2, 7, 9, 4]": arguments(
        "ring", ring=ring_with(g=struct(2, 7, 9, 4, 6))
    ),
    "ring.counts has shape [3], expected [7]": arguments(
        "ring", ring=ring_with()._replace(counts=struct(3, dtype=jnp.int32))
    ),
    "ring.inputs is PyTreeDef(*), expected a dict of k, v, g, beta": arguments(
        "ring", ring=Ring(*[struct(2, 7, 9, dtype=jnp.int32)] * 4)
    ),
    "ring.order has shape [9], expected [7, Q]": arguments(
        "ring", ring=ring_with()._replace(order=struct(9, dtype=jnp.int32))
    ),
    "ring.order is float32, expected int32": arguments("ring", ring=ring_with()._replace(order=struct(7, 9))),
    "a tree has no last state to write; pass snapshots, ring": arguments(parents=struct(3, 4, dtype=jnp.int32)),
    "parents is float32, expected int32": arguments("snapshots", parents=struct(3, 4)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message):
    given = {"layer": 0} | REFUSED[message]
    static = {name: given.pop(name) for name in ("layer", "form", "disable_state_update") if name in given}
    with pytest.raises(ValueError, match=re.escape(f"gated_delta_update: {message}")):
        jax.eval_shape(functools.partial(gated_delta_update, **static), **given)


def test_fold_history_checks_its_rows():
    state, ring = arguments()["state"], shapes.ring(SHAPE, SLOTS, LENGTH)
    rows = struct(3, dtype=jnp.int32)
    call = functools.partial(jax.eval_shape, functools.partial(fold_history, layer=0), state, ring, slots=rows)
    assert call(to_slots=rows, num_tokens=rows).shape == state.shape
    with pytest.raises(ValueError, match=re.escape("num_tokens has shape [2], expected [3]")):
        call(num_tokens=struct(2, dtype=jnp.int32))


@pytest.mark.parametrize("keep", ["state", "snapshots", "ring"])
def test_shapes_and_dtypes_come_back_as_they_were(keep):
    given = arguments(keep)
    result = jax.eval_shape(functools.partial(gated_delta_update, layer=1), **given)
    assert (result.y.shape, result.y.dtype) == (given["v"].shape, given["v"].dtype)
    for name in ("state", "snapshots", "ring"):
        kept, came = (
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), t) for t in (getattr(result, name), given.get(name))
        )
        assert kept == came


@pytest.mark.parametrize("keep", ["state", "snapshots", "ring"])
def test_donated_buffers_are_updated_in_place(keep):
    """Temporaries do not grow with the pool."""
    temporaries = []
    donated = ("state", "ring") if keep == "ring" else ("snapshots",) if keep == "snapshots" else ("state",)
    for slots in (SLOTS, 16 * SLOTS):
        given = shapes.arguments(SHAPE, slots, BATCH, STEPS, keep=keep, length=LENGTH)
        jitted = jax.jit(functools.partial(gated_delta_update, layer=1), donate_argnames=donated)
        memory = jitted.lower(**given).compile({"xla_backend_optimization_level": 0}).memory_analysis()
        leaves = jax.tree.leaves([given[name] for name in donated])
        assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
