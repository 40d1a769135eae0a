"""Logits against transformers: full forward, chunks of prompt down to one token, and token by token."""

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.assets import TINY
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.models.families import config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.loading import load
from mamba_spec_jax.modes import SpeculativeMode

GOLDEN = Path(__file__).parents[2] / "golden"
DECODED = ("bundled", "dense", "moe", "rope", "groups", "no_conv_bias", "multipliers", "dt_limits")
# The others differ from those in how they are stored, in projections that every pass shares, in which layers there are,
# or, `trained_dt`, are verified in a window, which is the decode step's arithmetic.
CASES = (*DECODED, "trained_dt", "mamba_only", "published", "published_rope_moe", "sharded", "biases")
# Logits are of order one to ten and come out within 1e-5 of transformers'.
TOLERANCE = 3e-5
# The arithmetic is checked here, not the optimiser, whose passes take most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}


class Golden:
    """A checkpoint, what transformers computes with it, and our passes over it, each compiled once."""

    def __init__(self, folder: Path, golden: Path):
        self.folder = folder
        with np.load(golden) as arrays:
            self.arrays = dict(arrays)
        loaded = load(folder)
        self.model, self.params = loaded.model, loaded.params
        self.tokens: np.ndarray = self.arrays["tokens"]
        self.logits: np.ndarray = self.arrays["logits"]
        # One row for every prefix of every text: a single pass then shows the logits of every position.
        B, T = self.tokens.shape
        self.text = np.repeat(np.arange(B), T)
        self.prefix = np.tile(np.arange(1, T + 1), B)
        self.expected = self.logits[self.text, self.prefix - 1]
        self._prefill = jax.jit(self.model.prefill, compiler_options=QUICKLY)
        self.decode = jax.jit(self.model.decode, compiler_options=QUICKLY)

    def prefill(self, cache: HybridCache, start: np.ndarray, end: np.ndarray):
        """Tokens `start[r]..end[r]` of each row's text, row r in slot r."""
        rows, T = len(start), self.tokens.shape[1]
        chunk = self.tokens[self.text[:, None], np.minimum(start[:, None] + np.arange(T), T - 1)]
        slots = jnp.arange(rows, dtype=jnp.int32)
        num_tokens = jnp.asarray(end - start, jnp.int32)
        return self._prefill(self.params, jnp.asarray(chunk), cache, slots=slots, num_tokens=num_tokens)

    def empty_cache(self) -> HybridCache:
        return self.model.init_cache(len(self.prefix), self.tokens.shape[1])


@pytest.fixture(scope="module", params=CASES)
def golden(request) -> Golden:
    if request.param == "bundled":
        return Golden(TINY, GOLDEN / "bundled_tiny.npz")
    return Golden(GOLDEN / request.param, GOLDEN / request.param / "golden.npz")


def assert_close(ours: jax.Array, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=TOLERANCE)


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
