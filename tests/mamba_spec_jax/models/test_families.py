"""What every family owes: transformers' logits in every kind of pass, exact commits, and lossless speculation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mamba_spec_jax as ms
from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.families import FAMILIES
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import CommitStrategy
from tests.golden.family_cases import FAMILY_CASES

from .goldens import GOLDEN, QUICKLY, Golden, assert_close, write_checkpoint

CASES = {f"{case.family}/{case.name}": case for case in FAMILY_CASES}
CLAMPED = ["nemotron_h/trained_dt", "zamba2/trained_dt"]
# One model a family, with its every switch set, for what does not depend on transformers. Those of Qwen3.5 are made up
# of Qwen3-Next's layers, and stored otherwise.
SWITCHED = [name for name in CASES if name.endswith("/switches") and not name.startswith("qwen3_5")]
# Not every combination compiles in the time that a test run may take; tests/sweeps has the others.
READ = [name for name in CASES if not name.startswith("qwen3_5") or name.endswith("/switches")]
MAMBA2 = ("mamba2", "bamba", "falcon_h1", "nemotron_h", "zamba2")
ONE_STRATEGY = {
    "qwen3_next/switches": CommitStrategy.REPLAY,
    "jamba/switches": CommitStrategy.REPLAY,
    "lfm2/switches": CommitStrategy.SNAPSHOT,
}
COMMITTED = [
    (name, strategy)
    for name in SWITCHED
    for strategy in (CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY)
    if name.startswith(MAMBA2) or ONE_STRATEGY.get(name) is strategy
]
SPECULATED = [name for name in SWITCHED if not name.startswith(("olmo", "kimi"))]
DECODED = [name for name in CASES if name.startswith(MAMBA2) or name in SWITCHED]


@pytest.fixture(scope="module", params=READ)
def golden(request, tmp_path_factory) -> Golden:
    return make_golden(request.param, tmp_path_factory.getbasetemp())


@functools.cache
def make_golden(name: str, base) -> Golden:
    return write_checkpoint(CASES[name], base / name.replace("/", "_"))


def test_every_golden_is_here_and_every_family_has_three():
    assert sorted(f"{path.parts[-3]}/{path.parts[-2]}" for path in GOLDEN.glob("*/*/golden.npz")) == sorted(CASES)
    covered = {name: [case for case in FAMILY_CASES if case.family == name] for name in FAMILIES}
    for name in set(FAMILIES) - {"granitemoehybrid"}:  # which has goldens of its own
        assert any(len(covered[other]) >= 3 for other in FAMILIES if FAMILIES[other] is FAMILIES[name]), name


def test_full_forward(golden):
    output = golden.prefill(golden.empty_cache(), np.zeros_like(golden.prefix), golden.prefix)
    assert_close(output.logits, golden.expected)
    np.testing.assert_array_equal(output.cache.lengths, golden.prefix)


@pytest.mark.parametrize("golden", CLAMPED, indirect=True)
def test_time_steps_may_be_left_as_they_come(golden):
    """transformers' full forward clamps them to `time_step_min`, whatever the `time_step_limit` of the file."""
    expected = golden.arrays["logits_unclamped"]
    assert np.abs(expected - golden.logits).max() > 1e-2
    B, T = golden.tokens.shape
    free = load(golden.folder, time_step_limit=(0.0, math.inf))
    rows = jnp.arange(B, dtype=jnp.int32)
    prefill = jax.jit(free.model.prefill, compiler_options=QUICKLY)
    cache, counts = free.model.init_cache(B, T), jnp.full(B, T, jnp.int32)
    output = prefill(free.params, jnp.asarray(golden.tokens), cache, slots=rows, num_tokens=counts)
    assert_close(output.logits, expected[:, -1])


def test_chunks_of_prompt_the_last_one_token_long(golden):
    T = golden.tokens.shape[1]
    last = golden.prefix - 1
    first = np.minimum(np.arange(len(last)) * 5 % T, last)  # every row is cut somewhere else
    cache = golden.empty_cache()
    for start, end in ((np.zeros_like(last), first), (first, last)):
        cache = golden.prefill(cache, start, end).cache
    assert_close(golden.prefill(cache, last, golden.prefix).logits, golden.expected)


@pytest.mark.parametrize("golden", DECODED, indirect=True)
def test_prefill_then_token_by_token(golden):
    T = golden.tokens.shape[1]
    cache = golden.prefill(golden.empty_cache(), np.zeros_like(golden.prefix), golden.prefix).cache
    slots = jnp.asarray(np.flatnonzero(golden.prefix == T // 3), jnp.int32)
    for t in range(T // 3, T):
        output = golden.decode(golden.params, jnp.asarray(golden.tokens[:, t]), cache, slots=slots)
        assert_close(output.logits, golden.logits[:, t])
        cache = output.cache


def test_parameter_count(golden):
    assert golden.model.num_params == golden.arrays["num_parameters"]
    assert sum(leaf.size for leaf in jax.tree.leaves(golden.params)) == golden.arrays["num_parameters"]


@pytest.mark.parametrize(("golden", "strategy"), COMMITTED, indirect=["golden"])
def test_commit_at_every_accept_length_equals_decoding(golden, strategy):
    """Row a of one verify accepts a tokens; its state, and its next logits, are those of decoding a tokens."""
    T, text = 4, golden.tokens[0]
    rows = T + 1
    model = HybridModel.create(golden.model.config, strategy=strategy)
    slots = jnp.arange(rows, dtype=jnp.int32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(params, draft, cache, steps):
        output = model.verify(params, draft, cache)
        return output.logits, model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, steps)

    def read(cache, start, lengths, steps):
        """Every row reads from `start[row]` on; tokens past its draft are wrong ones."""
        window = text[np.minimum(np.asarray(start)[:, None] + np.arange(T), len(text) - 1)]
        wrong = (window + 1) % model.vocab_size
        tokens = np.where(np.arange(T) <= np.asarray(lengths)[:, None], window, wrong)
        draft = Draft(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32), slots)
        return step(golden.params, draft, cache, jnp.asarray(steps, jnp.int32))

    everywhere = np.full(rows, T)
    _, prompted = read(model.init_cache(rows, 32), 0 * everywhere, everywhere - 1, everywhere - 1)
    logits, committed = read(prompted, everywhere, everywhere - 1, np.arange(rows) - 1)
    np.testing.assert_array_equal(committed.lengths, T + np.arange(rows))
    after, _ = read(committed, T + np.arange(rows), 0 * everywhere, 0 * everywhere)
    one_by_one = prompted
    for accepted in range(rows):
        for name in ("ssm", "conv"):
            ours, theirs = (getattr(cache.mamba, name)[:, accepted] for cache in (committed, one_by_one))
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name} after {accepted} tokens")
        decoded, one_by_one = read(one_by_one, everywhere + accepted, 0 * everywhere, 0 * everywhere)
        np.testing.assert_array_equal(after[accepted, 0], decoded[accepted, 0])
        if accepted < T:
            np.testing.assert_array_equal(logits[0, accepted], decoded[0, 0])
    assert_close(after[:, 0], golden.logits[0, T + np.arange(rows)])


@pytest.mark.parametrize("golden", SPECULATED, indirect=True)
def test_speculative_greedy_is_plain_greedy(golden):
    """Drafts or none through the same compiled steps: the same tokens, and the same bits behind them."""
    prompts = [golden.tokens[b, start:end].tolist() for b, start, end in ((0, 0, 3), (0, 2, 6), (1, 0, 1), (1, 4, 6))]
    decoder, weights = ms.Decoder(golden.model, ms.NgramDrafter(3)), ms.Weights(golden.params)
    decode = jax.jit(decoder.until_finished, donate_argnames="state", compiler_options=QUICKLY)

    def run(limit):
        return decode(weights, decoder.init(weights, prompts, max_new=128, depth_limit=limit, logprobs=True))

    plain, speculative = run(0), run(3)
    np.testing.assert_array_equal(plain.lengths, [len(prompt) + 128 for prompt in prompts])
    assert int(plain.statistics.drafted.sum()) == 0
    mean = float(speculative.statistics.mean_acceptance_length)
    assert mean > 1.2, "drafts were hardly ever accepted: nothing was tested"
    for name in ("tokens", "lengths", "logprobs"):
        np.testing.assert_array_equal(getattr(speculative, name), getattr(plain, name), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, speculative.cache.mamba, plain.cache.mamba)
