"""What transformers computed for tiny models, and our passes over the same texts."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.loaded import load
from tests.golden.family_cases import FamilyCase
from tests.golden.weights import digest, draw_all

GOLDEN = Path(__file__).parents[2] / "golden"
# Logits are of order one to ten and come out within 1e-5 of transformers'.
TOLERANCE = 3e-5
# The arithmetic is checked here, not the optimiser, whose passes take most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}


class Golden:
    """A checkpoint, what transformers computes with it, and our passes over it, each compiled once."""

    def __init__(self, folder: Path, golden: Path, **options):
        self.folder = folder
        with np.load(golden) as arrays:
            self.arrays = dict(arrays)
        loaded = load(folder, **options)
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


def write_checkpoint(case: FamilyCase, folder: Path) -> Golden:
    """The golden of a family's case, its weights drawn anew by the rule that made it."""
    source = GOLDEN / case.family / case.name
    with np.load(source / "golden.npz") as arrays:
        shapes, expected = json.loads(str(arrays["shapes"])), str(arrays["weights_sha256"])
    weights = draw_all(shapes, case.seed, case.trained_dt, case.family)
    assert digest(weights) == expected, "the rule draws other weights: run tests/golden/make_goldens.py families"
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(weights, folder / "model.safetensors")
    return Golden(folder, source / "golden.npz")


def assert_close(ours: jax.Array, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=TOLERANCE)
