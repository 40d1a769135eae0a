"""Logits against transformers: full forward, chunks of prompt down to one token, and token by token."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.assets import TINY
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.families import config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import SpeculativeMode

from .goldens import GOLDEN, QUICKLY, Golden, assert_close

DECODED = ("bundled", "dense", "moe", "rope", "groups", "no_conv_bias", "multipliers", "dt_limits")
# The others differ from those in how they are stored, in projections that every pass shares, in which layers there are,
# or, `trained_dt`, are verified in a window, which is the decode step's arithmetic.
CASES = (*DECODED, "trained_dt", "mamba_only", "published", "published_rope_moe", "sharded", "biases")


@pytest.fixture(scope="module", params=CASES)
def golden(request) -> Golden:
    if request.param == "bundled":
        return Golden(TINY, GOLDEN / "bundled_tiny.npz")
    return Golden(GOLDEN / request.param, GOLDEN / request.param / "golden.npz")


def test_every_golden_is_here():
    assert sorted([*(path.parent.name for path in GOLDEN.glob("*/golden.npz")), "bundled"]) == sorted(CASES)


def test_full_forward(golden):
    output = golden.prefill(golden.empty_cache(), np.zeros_like(golden.prefix), golden.prefix)
    assert_close(output.logits, golden.expected)
    np.testing.assert_array_equal(output.cache.lengths, golden.prefix)


def test_chunks_of_prompt_the_last_one_token_long(golden):
    T = golden.tokens.shape[1]
    last = golden.prefix - 1
    first = np.minimum(np.arange(len(last)) * 5 % T, last)  # every row is cut somewhere else
    cache = golden.empty_cache()
    for start, end in ((np.zeros_like(last), first), (first, last)):
        cache = golden.prefill(cache, start, end).cache
    output = golden.prefill(cache, last, golden.prefix)
    assert_close(output.logits, golden.expected)


@pytest.mark.parametrize("golden", DECODED, indirect=True)
def test_prefill_then_token_by_token(golden):
    B, T = golden.tokens.shape
    prompt = T // 3
    cache = golden.prefill(golden.empty_cache(), np.zeros_like(golden.prefix), golden.prefix).cache
    slots = jnp.asarray(np.flatnonzero(golden.prefix == prompt), jnp.int32)
    for t in range(prompt, T):
        output = golden.decode(golden.params, jnp.asarray(golden.tokens[:, t]), cache, slots=slots)
        assert_close(output.logits, golden.logits[:, t])
        cache = output.cache
    np.testing.assert_array_equal(cache.lengths[slots], np.full(B, T))


@pytest.mark.parametrize("mode", list(SpeculativeMode))
@pytest.mark.parametrize("golden", ["published_rope_moe", "trained_dt"], indirect=True)
def test_verify_window_as_long_as_the_text(golden, mode):
    B, T = golden.tokens.shape
    model = HybridModel.create(golden.model.config, speculative_mode=mode)
    slots = jnp.arange(B, dtype=jnp.int32)
    draft = Draft(jnp.asarray(golden.tokens), jnp.full((B,), T - 1, jnp.int32), slots)
    output = jax.jit(model.verify, compiler_options=QUICKLY)(golden.params, draft, model.init_cache(B, T))
    assert_close(output.logits, golden.logits)


def test_parameter_count(golden):
    assert golden.model.num_params == golden.arrays["num_parameters"]
    assert sum(leaf.size for leaf in jax.tree.leaves(golden.params)) == golden.arrays["num_parameters"]


def test_bundled_golden_belongs_to_the_bundled_weights():
    with np.load(GOLDEN / "bundled_tiny.npz") as arrays:
        recorded = str(arrays["weights_sha256"])
    digest = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert digest == recorded, "the bundled weights changed: run tests/golden/make_goldens.py bundled"


def published() -> list[dict]:
    return json.loads((GOLDEN / "published.json").read_text())


@pytest.mark.parametrize("entry", published(), ids=lambda entry: entry["name"])
def test_published_configurations_have_their_parameter_counts(entry):
    model = HybridModel.create(config_from_hf({"model_type": "granitemoehybrid"} | entry["config"]))
    assert model.num_params == entry["num_parameters"]
    assert model.config.tie_embeddings == entry["tied"]


def test_decode_step_of_48_layers_at_real_widths_compiles():
    (micro,) = [entry for entry in published() if entry["name"].endswith("h-micro")]
    config = config_from_hf({"model_type": "granitemoehybrid"} | micro["config"])
    model = HybridModel.create(dataclasses.replace(config, layer_types=(*(["mamba"] * 11), "attention") * 4))
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(4, 1024))
    step = jax.jit(model.decode, donate_argnums=2, compiler_options=QUICKLY)
    compiled = step.lower(model.abstract_params(), rows, cache, slots=rows).compile()
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > 4 * model.num_params  # the weights are arguments, not constants
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
