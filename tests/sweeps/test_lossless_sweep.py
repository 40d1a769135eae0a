"""Speculative against plain decoding on the bundled model: 32 prompts of 256 new tokens, every form, depth and method,
and every drafter.

Not collected by default: `pytest tests/sweeps/test_lossless_sweep.py`, some minutes on a CPU. Writes what it saw to
results/lossless.json, each differing token with the gap between the two best logits there.
"""

import itertools
import json
import os
import platform
from pathlib import Path

import jax
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.assets import TINY
from mamba_spec_jax.cli.prompts import NUM_PROMPTS, PromptKind, demo_prompts
from training.evaluate_drafters import drafters

RESULTS = Path(__file__).parent / "results" / "lossless.json"
PROMPTS, NEW, DEPTHS, DRAFTS = 32, 256, (0, 1, 3, 7), 4
DRAFTERS = (
    "n-gram tree", "EAGLE-3", "MTP", "DFlash", "draft model", "EAGLE-3 tree", "n-gram, else EAGLE-3",
)  # fmt: skip
FORMS = {
    "decode, snapshot": (ms.SpeculativeMode.DECODE, ms.CommitStrategy.SNAPSHOT),
    "prefill, snapshot": (ms.SpeculativeMode.PREFILL, ms.CommitStrategy.SNAPSHOT),
    "decode, replay": (ms.SpeculativeMode.DECODE, ms.CommitStrategy.REPLAY),
}
METHODS = {
    "greedy": {},
    "sampled": {"top_k": 40, "top_p": 0.95, "temperature": 0.7, "seeds": 11},
}


class Sweep:
    """The bundled model, its prompts, and plain decoding of them by every method."""

    def __init__(self):
        self.loaded = ms.load(TINY)
        assert self.loaded.tokenizer is not None
        texts = [text for kind in PromptKind for text in demo_prompts(kind, NUM_PROMPTS)]
        texts += [text[: len(text) // 2] for text in demo_prompts(PromptKind.FREE, NUM_PROMPTS)]
        self.prompts = [self.loaded.tokenizer.encode(text).ids for text in texts]
        assert len(self.prompts) == PROMPTS
        self.plain = {name: self.run(self.loaded.model, name, 0).tokens for name in METHODS}

    def run(self, model, method, num_drafts, **drafting):
        options = METHODS[method] | drafting
        return ms.generate(model, self.loaded.params, self.prompts, num_drafts=num_drafts, max_new=NEW, **options)

    def differences(self, method, tokens):
        """The first differing token of each row; what follows it follows from it."""
        found = []
        for row, (mine, theirs) in enumerate(zip(tokens, self.plain[method], strict=True)):
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
            if at is not None:
                best = np.sort(self.logits_after(self.prompts[row] + theirs[:at]))[-2:]
                gap = float(best[1] - best[0])
                found.append({"row": row, "at": at, "token": mine[at], "plain": theirs[at], "logit_gap": gap})
        return found

    def logits_after(self, text):
        model = self.loaded.model
        cache = model.init_cache(1, len(text))
        row, length = np.zeros(1, np.int32), np.asarray([len(text)], np.int32)
        tokens = np.asarray([text], np.int32)
        return np.asarray(model.prefill(self.loaded.params, tokens, cache, slots=row, num_tokens=length).logits)[0]


@pytest.fixture(scope="module")
def sweep():
    return Sweep()


@pytest.fixture(scope="module")
def report():
    results = []
    yield results
    device = jax.devices()[0]
    header = {
        "prompts": PROMPTS,
        "new_tokens": NEW,
        "dtype": "float32",
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(header | {"results": results}, indent=2) + "\n")


@pytest.mark.parametrize(("form", "method", "num_drafts"), list(itertools.product(FORMS, METHODS, DEPTHS)))
def test_token_identical_to_plain_decoding(sweep, report, form, method, num_drafts):
    mode, strategy = FORMS[form]
    model = ms.HybridModel.create(sweep.loaded.model.config, speculative_mode=mode, strategy=strategy)
    check(sweep, report, {"form": form, "method": method, "drafts": num_drafts}, sweep.run(model, method, num_drafts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_over_a_ring(sweep, report, name, method):
    drafter, params = drafters(sweep.loaded, DRAFTS)[name]
    model = ms.HybridModel.create(sweep.loaded.model.config, strategy=ms.CommitStrategy.REPLAY)
    target, drafts = model.with_hidden_layers(drafter.hidden_layers), drafter.max_drafts
    generation = sweep.run(target, method, drafts, drafter=drafter, drafter_params=params)
    check(sweep, report, {"form": "decode, replay", "method": method, "drafts": drafts, "drafter": name}, generation)


def check(sweep, report, run, generation):
    differences = sweep.differences(run["method"], generation.tokens)
    accepted = float(generation.statistics.mean_acceptance_length)
    found = {"identical": not differences, "mean_acceptance_length": round(accepted, 3), "differences": differences}
    report.append(run | found)
    assert sum(map(len, generation.tokens)) == PROMPTS * NEW
    assert differences == []
    if run["drafts"]:
        assert accepted > 1.2, "drafts were hardly ever accepted: nothing was tested"
