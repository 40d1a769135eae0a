"""What test_settings.py runs in a process with two devices, which the test suite's own processes do not have.

Every function of CHECKS returns whether its tokens, or states, are those of the plain run.
"""

import dataclasses
import functools
import json
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, PartitionSpec

import mamba_spec_jax as ms
from pallas_kernels import dispatch
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.generations import DRAFTERS, NEW, PROMPTS, SAMPLED, generation, own_step

TOKENS = jnp.asarray([[3, 9, 4], [5, 1, 2], [7, 7, 1], [1, 2, 3]], jnp.int32)
BY_SLOT = ("ssm", "conv", "inputs")  # pools `[L, S, ...]`; what else a state holds is `[S, ...]` or `[B, ...]`


def split_rows(tree: Any) -> Any:
    """Which axis of each leaf goes over the devices: that of slots and of rows; what has neither is on both."""

    def spec(path, leaf):
        name = jax.tree_util.keystr(path)
        if leaf.ndim == 0 or "constants" in name or "stops" in name:
            return PartitionSpec()
        return PartitionSpec(None, "data") if any(word in name for word in BY_SLOT) else PartitionSpec("data")

    return jax.tree_util.tree_map_with_path(spec, tree)


def over_devices(function, params: Any, *split: Any):
    """`function(params, *split)` under shard_map, with results sharded as the last of `split` and rows are."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = tuple(split_rows(tree) for tree in split)
    out = specs[-1] if len(split) == 1 else (PartitionSpec("data"), specs[-1])
    return jax.shard_map(function, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=out)


def same(found: Any, expected: Any) -> bool:
    """Whether all leaves have the same values."""
    return jax.tree.all(jax.tree.map(np.array_equal, found, expected))


@functools.cache
def plain_generation():
    return generation("prompt lookup", "sampled")


def plain_step(config: str, **options: Any):
    model = ms.HybridModel.create((tiny.CONFIGS | tiny.MADE_UP)[config], **options)
    params = tiny.random_params(model)
    step = jax.jit(own_step, static_argnums=0)
    return model, params, step(model, params, TOKENS, model.init_cache(4, 16))


def mesh(axis_type: AxisType) -> bool:
    expected = plain_generation()
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(axis_type,))):
        return generation("prompt lookup", "sampled") == expected


def default_device() -> bool:
    expected = plain_generation()
    with jax.default_device(jax.devices()[1]):
        return generation("prompt lookup", "sampled") == expected


def vmap_over_caches() -> bool:
    model, params, expected = plain_step("dense")
    caches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), model.init_cache(2, 16))
    step = jax.jit(jax.vmap(lambda tokens, cache: own_step(model, params, tokens, cache)[0]))
    return same(step(TOKENS.reshape(2, 2, 3), caches).reshape(4, 3), expected[0])


def index_checks() -> bool:
    model, params, expected = plain_step("dense")
    checked = checkify.checkify(lambda *args: own_step(model, *args), errors=checkify.index_checks)
    error, found = jax.jit(checked)(params, TOKENS, model.init_cache(4, 16))
    error.throw()
    return same(found, expected)


def own_step_over_devices(config: str, **options: Any) -> bool:
    model, params, expected = plain_step(config, **options)
    cache = model.init_cache(4, 16)
    step = over_devices(lambda *args: own_step(model, *args), params, TOKENS, cache)
    return same(jax.jit(step)(params, TOKENS, cache), expected)


def decoding_over_devices() -> bool:
    """Two rows a device, which finish at different times."""
    drafting = DRAFTERS["prompt lookup"]()
    decoder = ms.Decoder(drafting.target, drafting.drafter, ms.Sampling())
    weights = ms.Weights(tiny.random_params(drafting.target))
    options = SAMPLED | {"seeds": [5, 6, 7, 8], "max_new": [NEW, 3, 1, NEW]}
    state = decoder.init(weights, PROMPTS * 2, **options)

    def decode(weights, state):
        rows = jnp.arange(state.lengths.size, dtype=jnp.int32)  # a device's slots are numbered from 0
        state = dataclasses.replace(state, requests=dataclasses.replace(state.requests, slots=rows))
        return decoder.until_finished(weights, state)

    found = jax.jit(over_devices(decode, weights, state))(weights, state)
    expected = jax.jit(decode)(weights, state)
    return same((found.tokens, found.reasons), (expected.tokens, expected.reasons))


def kernels_over_devices() -> bool:
    """Traced as for a GPU: kernels' results and loops have types that `check_vma` accepts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "target", lambda: dispatch.Device("gpu", "H100", (9, 0)))
        for config in (tiny.CONFIGS | tiny.MADE_UP).values():
            for strategy in (ms.CommitStrategy.SNAPSHOT, ms.CommitStrategy.REPLAY):
                model = ms.HybridModel.create(config, strategy=strategy)
                cache = jax.eval_shape(lambda model=model: model.init_cache(4, 16))
                given = (model.abstract_params(), TOKENS, cache)
                traced = jax.make_jaxpr(over_devices(lambda *args, model=model: own_step(model, *args), *given))(*given)
                if "pallas_call" not in str(traced):
                    return False
    return True


REPLAY = {"strategy": ms.CommitStrategy.REPLAY}
CHECKS = {
    "a mesh with Auto axes": lambda: mesh(AxisType.Auto),
    "a mesh with Explicit axes": lambda: mesh(AxisType.Explicit),
    "a default device that is not the first": default_device,
    "vmap over caches": vmap_over_caches,
    "checkify.index_checks": index_checks,
    "a step under shard_map": lambda: own_step_over_devices("dense"),
    "a step under shard_map, experts, replay": lambda: own_step_over_devices("moe", **REPLAY),
    "decoding under shard_map": decoding_over_devices,
    "kernels under shard_map": kernels_over_devices,
}


def outcome(check: Callable[[], bool]) -> str:
    try:
        return "same" if check() else "differs"
    except Exception:
        return traceback.format_exc(limit=-3)


if __name__ == "__main__":
    print(json.dumps({name: outcome(check) for name, check in CHECKS.items()}))
