"""Speculative output is plain output, token for token, on the bundled model."""

import jax
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.assets import TINY
from mamba_spec_jax.speculative.chunks import decode_chunks
from mamba_spec_jax.speculative.generate import collect

SNIPPETS = [
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef read_lines(path):\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "for i in range(10):\n    print(i)\n\nfor j in range(10):\n",
]
NEW = 48


@pytest.fixture(scope="module")
def bundled():
    return ms.load(TINY)


@pytest.fixture(scope="module")
def prompts(bundled):
    return [bundled.tokenizer.encode(text).ids for text in SNIPPETS]


@pytest.fixture(scope="module")
def plain(bundled, prompts):
    return ms.generate(bundled.model, bundled.params, prompts, num_drafts=0, max_new=NEW).tokens


def assert_identical(actual, expected, logits_at):
    """Token identity; a difference is reported with the gap between the two best logits at its first place."""
    for row, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if mine != theirs:
            at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            best = np.sort(logits_at(row, at))[-2:]
            pytest.fail(
                f"row {row} differs at token {at}: {mine[at]} for {theirs[at]}, logit gap {best[1] - best[0]:.2e}"
            )


@pytest.mark.parametrize(
    ("mode", "strategy", "drafts"),
    [
        (ms.SpeculativeMode.PREFILL, ms.CommitStrategy.SNAPSHOT, 3),
        (ms.SpeculativeMode.DECODE, ms.CommitStrategy.REPLAY, 1),
    ],
    ids=["prefill-snapshot-3", "decode-replay-1"],
)
def test_greedy_is_token_identical(bundled, prompts, plain, mode, strategy, drafts):
    """Other modes, strategies and depths than the test of bits below; their product is in tests/sweeps."""
    model = ms.HybridModel.create(bundled.model.config, speculative_mode=mode, strategy=strategy)
    generation = ms.generate(model, bundled.params, prompts, num_drafts=drafts, max_new=NEW)

    def logits_at(row, at):
        tokens = np.asarray([prompts[row] + plain[row][:at]], np.int32)
        one = np.zeros(1, np.int32)
        cache = bundled.model.init_cache(1, tokens.shape[1])
        length = np.asarray([tokens.shape[1]], np.int32)
        return np.asarray(bundled.model.prefill(bundled.params, tokens, cache, slots=one, num_tokens=length).logits)[0]

    assert_identical(generation.tokens, plain, logits_at)
    assert generation.statistics.mean_acceptance_length > 1.2, "drafts were hardly ever accepted: nothing was tested"


def test_sampled_is_token_identical_with_prompt_lookup(bundled, prompts, plain):
    options = {"top_k": 40, "top_p": 0.95, "temperature": 0.7, "seeds": 5, "max_new": NEW}
    plainly = ms.generate(bundled.model, bundled.params, prompts, num_drafts=0, **options)
    speculatively = ms.generate(bundled.model, bundled.params, prompts, num_drafts=7, **options)
    assert speculatively.tokens == plainly.tokens
    assert speculatively.statistics.mean_acceptance_length > 1.1
    assert plainly.tokens != plain


def test_an_automatic_number_of_drafts_is_token_identical(bundled, prompts, plain):
    assert (
        ms.generate(bundled.model, bundled.params, prompts, num_drafts="auto", max_new=NEW, chunk_steps=4).tokens
        == plain
    )


def test_zero_drafts_in_the_same_compiled_step_give_the_same_bits(bundled, prompts, plain):
    """Plain decoding through the step of the speculative run: the same logits (as logprobs), states and windows.

    And the tokens of plain decoding through a step of its own, one token wide.
    """
    decoder, weights = ms.Decoder(bundled.model, ms.NgramDrafter(7)), ms.Weights(bundled.params)

    def run(limit):
        state = decoder.init(weights, prompts, max_new=NEW, depth_limit=limit, logprobs=True)
        for newest, _ in decode_chunks(decoder, weights, state):
            state = newest
        return state

    plainly, speculatively = run(0), run(7)
    assert int(plainly.statistics.drafted.sum()) == 0
    assert float(speculatively.statistics.mean_acceptance_length) > 1.2
    assert collect(speculatively).tokens == plain
    for name in ("tokens", "lengths", "logprobs"):
        np.testing.assert_array_equal(getattr(speculatively, name), getattr(plainly, name), err_msg=name)
    np.testing.assert_array_equal(speculatively.cache.lengths, plainly.cache.lengths)
    jax.tree.map(np.testing.assert_array_equal, speculatively.cache.mamba, plainly.cache.mamba)
