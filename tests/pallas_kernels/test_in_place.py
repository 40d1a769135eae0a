"""Donated pools are updated where they lie: no pool-sized copy or temporary in the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import compat, state_commit, state_scatter

L, R, T = 3, 4, 5
SMALL, LARGE = 9, 144
# Buffers are assigned before machine code is made: no need to make it well.
QUICKLY = {"xla_backend_optimization_level": 0}


def arguments(slots, conv_dtype):
    dtype = jnp.dtype(conv_dtype)
    return {
        "ssm": jnp.zeros((L, slots, 8, 32)),
        "conv": jnp.zeros((L, slots, 3, 40), dtype),
        "ssm_states": jnp.ones((L, R, T, 8, 32)),
        "conv_inputs": jnp.ones((L, R, T, 40), dtype),
        "slots": jnp.arange(R, dtype=jnp.int32),
        "steps": jnp.arange(R, dtype=jnp.int32),
        "track_slots": jnp.arange(R, 2 * R, dtype=jnp.int32),
        "track_steps": jnp.arange(R, dtype=jnp.int32),
    }


def compile_commit(slots, conv_dtype, tree=False):
    given = arguments(slots, conv_dtype)
    if tree:
        given["parents"] = jnp.zeros((R, T), jnp.int32) - 1
    jitted = jax.jit(lambda **kwargs: state_commit(**kwargs), donate_argnames=("ssm", "conv"))
    return jitted.lower(**given).compile(QUICKLY), given


def compile_scatter(slots, dtype):
    given = arguments(slots, dtype)
    index = {name: given[name] for name in ("slots", "steps", "track_slots", "track_steps")}
    dst, src = jnp.zeros((L, slots, 8, 32), dtype), jnp.ones((L, R, T, 8, 32), dtype)
    jitted = jax.jit(lambda **kwargs: state_scatter(**kwargs), donate_argnames="dst")
    return jitted.lower(dst=dst, src=src, **index).compile(QUICKLY), {"dst": dst, "src": src} | index


moves_bfloat16 = pytest.mark.skipif(
    not compat.CPU_MOVES_BFLOAT16, reason="XLA's CPU compiler copies bfloat16 before 0.11"
)
DTYPES = ["float32", "float16", pytest.param("bfloat16", marks=moves_bfloat16)]


def pool_sized_copies(compiled, slots):
    """Copies in the program of anything with the pool's slot dimension."""
    return re.findall(rf"= \w+\[{L},{slots}[,\]]\S* copy\(", compiled.as_text())


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_commit_allocates_windows_only(dtype, tree):
    temporaries = []
    for slots in (SMALL, LARGE):
        compiled, given = compile_commit(slots, dtype, tree)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == given["ssm"].nbytes + given["conv"].nbytes
        assert pool_sized_copies(compiled, slots) == []
        temporaries.append(memory.temp_size_in_bytes)
    one_window = L * 3 * 40 * 4
    assert temporaries[0] == temporaries[1] <= 6 * one_window + 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_scatter_allocates_nothing(dtype):
    for slots in (SMALL, LARGE):
        compiled, given = compile_scatter(slots, dtype)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == given["dst"].nbytes
        assert memory.temp_size_in_bytes <= 2048
        assert pool_sized_copies(compiled, slots) == []


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn", "bfloat16"])
def test_no_pool_is_widened(dtype):
    """What XLA's CPU compiler cannot move as it is, it moves as bits: a copy each way at most, and no arithmetic."""
    for compiled, given in (compile_scatter(LARGE, dtype), compile_commit(LARGE, dtype)):
        text = compiled.as_text()
        assert re.findall(rf"\b(?:f16|f32)\[{L},{LARGE},(?:3,40|256|8,32)\]\S* convert\(", text) == []
        pool = next(given[name] for name in ("dst", "conv") if name in given)
        windows = 6 * L * 3 * 40 * 4 + 4096
        assert compiled.memory_analysis().temp_size_in_bytes <= pool.nbytes + windows


def test_the_donated_buffer_is_the_result():
    compiled, given = compile_commit(SMALL, "float32")
    before = given["ssm"].unsafe_buffer_pointer(), given["conv"].unsafe_buffer_pointer()
    ssm, conv = compiled(**given)
    assert (ssm.unsafe_buffer_pointer(), conv.unsafe_buffer_pointer()) == before
    assert given["ssm"].is_deleted()
    np.testing.assert_array_equal(ssm[:, : 2 * R], 1)
    np.testing.assert_array_equal(ssm[:, 2 * R :], 0)


def test_pool_sized_copies_sees_one():
    """The check above is not blind: keeping the old pool alive forces a copy."""
    given = arguments(SMALL, "float32")
    given.pop("track_slots"), given.pop("track_steps")

    def keeps_old(ssm, conv, **kwargs):
        return state_commit(ssm, conv, **kwargs), ssm + 1

    compiled = jax.jit(keeps_old, donate_argnames=("ssm", "conv")).lower(**given).compile(QUICKLY)
    assert pool_sized_copies(compiled, SMALL) != []
