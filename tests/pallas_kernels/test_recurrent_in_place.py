"""Donated pools, snapshots and rings are updated where they lie, layer after layer, in the program that a CPU runs."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import fold_history, selective_state_update
from pallas_kernels.selective_state_update import shapes

SHAPE = shapes.SSMShape(layers=2, heads=4, head_dim=8, state=16, groups=2, dtype=jnp.float32)
BATCH, TOKENS, LENGTH = 4, 3, 8
SMALL, LARGE = 9, 144
# Buffers are assigned before machine code is made: no need to make it well.
QUICKLY = {"xla_backend_optimization_level": 0}
BUFFERS = {"state": ("state",), "snapshots": ("state", "snapshots"), "ring": ("state", "ring"), "fold": ("state",)}


def every_layer(keep, form):
    """All layers of one pass, one behind the other."""

    def run(buffers, given):
        for layer in range(SHAPE.layers):
            if keep == "fold":
                state = fold_history(**buffers, **given, layer=layer, form=form)
                buffers = {"state": state}
                continue
            result = selective_state_update(**buffers, **given, layer=layer, form=form)
            buffers = {name: getattr(result, name) for name in buffers}
        return buffers

    return run


def compiled(slots, keep, form):
    given = shapes.arguments(SHAPE, slots, BATCH, TOKENS, keep="ring" if keep == "fold" else keep, length=LENGTH)
    if keep == "fold":
        given = {name: given[name] for name in ("state", "ring", "A", "slots")}
    buffers = {name: given.pop(name) for name in BUFFERS[keep]}
    program = jax.jit(every_layer(keep, form), donate_argnums=0).lower(buffers, given).compile(QUICKLY)
    return program, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(buffers))


@pytest.mark.parametrize(("keep", "form"), [*((keep, "step") for keep in BUFFERS), ("ring", "chunk")])
def test_no_buffer_is_copied(keep, form):
    temporaries = []
    for slots in (SMALL, LARGE):
        program, size = compiled(slots, keep, form)
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == size
        copied = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", program.as_text())
        assert not [shape for shape in copied if shape.startswith((f"2,{slots},", f"2,{BATCH},{TOKENS},"))]
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]
