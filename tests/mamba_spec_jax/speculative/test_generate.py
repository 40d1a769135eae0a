"""Whole generations on a small random model: stops, rows, statistics, what the host reads, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
import scipy.special

import mamba_spec_jax as ms
from mamba_spec_jax.speculative import chunks as driver
from mamba_spec_jax.speculative.chunks import decode_chunks
from mamba_spec_jax.speculative.compiled_programs import program_count
from mamba_spec_jax.speculative.generate import collect

CONFIG = ms.HybridConfig(
    model_type="granitemoehybrid",
    vocab_size=13,
    hidden_size=16,
    layer_types=("mamba", "attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    attention_scale=0.35,
    recurrent=ms.Mamba2Config(
        heads=2,
        head_dim=8,
        state=8,
        groups=1,
        conv_width=3,
    ),
    shared_intermediate_size=16,
    tie_embeddings=True,
)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], [4, 4, 4, 4]]
DRAFTS, NEW = 3, 24
ENDS = ms.StopConditions.create([5])
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def model():
    return ms.HybridModel.create(CONFIG)


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init_params, static_argnums=0)(3)


def run(model, params, prompts=PROMPTS, stops=None, num_drafts=DRAFTS, chunk_steps=4, **requests):
    """The final state, with which the committed side can be looked at."""
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(num_drafts)), ms.Weights(params)
    state = decoder.init(weights, prompts, stops=stops, **requests)
    for newest, _ in decode_chunks(decoder, weights, state, chunk_steps=chunk_steps):
        state = newest
    return state


def committed_states(model, params, texts, max_len):
    """What a cache holds after all but the last token of each text, decoded one at a time."""
    decode = jax.jit(model.decode)
    cache = model.init_cache(len(texts), max_len)
    for t in range(max(map(len, texts)) - 1):
        tokens = np.asarray([text[min(t, len(text) - 1)] for text in texts], np.int32)
        slots = np.asarray([row if t < len(text) - 1 else -1 for row, text in enumerate(texts)], np.int32)
        cache = decode(params, tokens, cache, slots=slots).cache
    return cache


def ending_at(tokens):
    """Conditions of one shape, however few the end tokens."""
    return ms.StopConditions.create(eos_ids=[*tokens, *tokens[:1] * (CONFIG.vocab_size - len(tokens))])


@pytest.fixture(scope="module")
def plain(model, params):
    return collect(run(model, params, num_drafts=0, max_new=NEW)).tokens


def test_budgets_per_row_zero_and_one_included(model, params, plain):
    state = run(model, params, max_new=[NEW, 0, 1])
    generation = collect(state)
    assert generation.tokens == [plain[0], [], plain[2][:1]]
    assert generation.reasons == [ms.StopReason.MAX_NEW] * 3
    np.testing.assert_array_equal(
        state.cache.lengths, [len(p) + len(t) - 1 for p, t in zip(PROMPTS, generation.tokens, strict=True)]
    )


def test_nothing_is_emitted_or_committed_past_an_end_token(model, params, plain):
    ends = [plain[0][5], plain[1][9]]
    state = run(model, params, max_new=NEW, stops=ending_at(ends))
    generation = collect(state)
    for row, text in enumerate(plain):
        at = next((i for i, token in enumerate(text) if token in ends), None)
        expected = text if at is None else text[: at + 1]
        assert generation.tokens[row] == expected
        assert generation.reasons[row] is (ms.StopReason.MAX_NEW if at is None else ms.StopReason.EOS)
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, generation.tokens, strict=True)]
    reference = committed_states(model, params, texts, state.cache.max_len)
    np.testing.assert_array_equal(state.cache.lengths, reference.lengths)
    np.testing.assert_allclose(state.cache.mamba.ssm, reference.mamba.ssm, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.cache.mamba.conv, reference.mamba.conv, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def without_its_first_token(model, params, plain):
    """The first row's first plain token ends a row, but not within six tokens of that row."""
    stops = ending_at(plain[0][:1])
    return collect(run(model, params, max_new=NEW, min_new=[6, 0, 0], stops=stops, logprobs=True))


def test_end_tokens_wait_for_min_new(model, params, plain, without_its_first_token):
    generation = collect(run(model, params, max_new=NEW, stops=ending_at(list(range(13)))))
    assert [len(tokens) for tokens in generation.tokens] == [1, 1, 1]
    assert plain[0][0] not in without_its_first_token.tokens[0][:6]


def test_stop_strings_end_a_row_at_the_token_that_completes_them(model, params, plain):
    token_bytes = [bytes([97 + token]) for token in range(13)]
    wanted = bytes(97 + token for token in plain[0][3:6])
    stops = ms.StopConditions.create(stop_strings=[wanted], token_bytes=token_bytes)
    generation = collect(run(model, params, max_new=NEW, stops=stops))
    text = b"".join(token_bytes[token] for token in plain[0])
    assert len(generation.tokens[0]) == text.find(wanted) + 3
    assert generation.reasons[0] is ms.StopReason.STOP_STRING


def test_statistics_add_up(model, params, plain):
    generation = collect(run(model, params, max_new=NEW))
    statistics = generation.statistics
    assert statistics.histogram.shape == (3, DRAFTS + 1)
    np.testing.assert_array_equal(statistics.histogram.sum(axis=1), statistics.passes)
    np.testing.assert_array_equal(statistics.emitted, [len(tokens) for tokens in generation.tokens])
    assert (statistics.drafted <= DRAFTS * statistics.passes).all()
    assert statistics.drafted.sum() > 0


def test_logprobs_are_the_targets_own(model, params, without_its_first_token):
    """Forbidding a token does not renormalise the others."""
    emitted, logprobs = without_its_first_token.tokens[0], without_its_first_token.logprobs[0]
    prefill = jax.jit(model.prefill)
    text = np.zeros((1, 32), np.int32)
    text[0, : len(PROMPTS[0]) + len(emitted)] = PROMPTS[0] + emitted
    cache, slots = model.init_cache(1, 32), np.zeros(1, np.int32)
    for at, (token, logprob) in enumerate(zip(emitted, logprobs, strict=True), len(PROMPTS[0])):
        logits = prefill(params, text, cache, slots=slots, num_tokens=np.asarray([at], np.int32)).logits
        assert logprob == pytest.approx(scipy.special.log_softmax(np.float64(logits[0]))[token], abs=1e-5)


def test_one_trace_serves_a_generation_of_varying_lengths(model, params):
    run(model, params, max_new=NEW)
    programs = program_count(driver._run_chunk)
    run(model, params, max_new=[3, 17, NEW])
    run(model, params, [[7, 8], [9] * 6, [2]], max_new=NEW, depth_limit=2)
    assert program_count(driver._run_chunk) == programs


def test_the_compiled_chunk_calls_nothing_on_the_host(model, params):
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(DRAFTS)), ms.Weights(params)
    state = decoder.init(weights, PROMPTS, max_new=NEW)
    text = driver._run_chunk.lower(decoder, weights, state, DRAFTS, 4).compile().as_text()
    assert "while" in text
    for word in ("callback", "infeed", "outfeed", " send(", " recv("):
        assert word not in text, word


@pytest.mark.parametrize("deliberate", [False, True])
def test_the_host_reads_only_at_chunk_ends(model, params, monkeypatch, deliberate):
    """Every conversion of a device array raises, except inside the driver's own read of a finished chunk."""
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(DRAFTS)), ms.Weights(params)
    state = decoder.init(weights, PROMPTS, max_new=NEW)
    array_type = type(state.lengths)
    reading, value = [], array_type._value

    def guarded(array):
        if not reading:
            raise AssertionError("a device array was read on the host within a chunk")
        return value.fget(array)

    def device_get(tree):
        reading.append(True)
        try:
            return jax.tree.map(lambda leaf: np.array(value.fget(leaf)), tree)
        finally:
            reading.pop()

    monkeypatch.setattr(array_type, "_value", property(guarded))
    monkeypatch.setattr(driver.jax, "device_get", device_get)
    chunks = 0
    if deliberate:
        newest, _ = next(decode_chunks(decoder, weights, state, chunk_steps=4))
        with pytest.raises(AssertionError, match="read on the host"):
            int(newest.lengths[0])
        return
    for _, report in decode_chunks(decoder, weights, state, chunk_steps=4):
        assert isinstance(report.lengths, np.ndarray)
        chunks += 1
    assert chunks > 1


@dataclasses.dataclass(frozen=True)
class ForgetfulBackend:
    """Returns the cache as it came."""

    def update_mamba_state_after_mtp_verify(self, cache, record, last_correct_step_indices, *tracking):
        return cache


@dataclasses.dataclass(frozen=True)
class ForgetfulDrafter(ms.NgramDrafter):
    """Verifies on a cache of its own and never commits."""

    model: ms.HybridModel = None

    def init(self, batch, max_len):
        return self.model.init_cache(batch, max_len)

    def update(self, params, state, progress):
        return dataclasses.replace(state, awaiting_commit=progress.mode is ms.ForwardMode.TARGET_VERIFY)


def test_a_commit_that_was_left_out_is_caught_while_tracing(model, params):
    class ForgetfulModel:
        backend = ForgetfulBackend()
        vocab_size = model.vocab_size
        hidden_layers = ()
        init_cache, prefill, verify = model.init_cache, model.prefill, model.verify

    def step(target, drafter):
        weights = ms.Weights(params)
        state = ms.Decoder(model, drafter).init(weights, PROMPTS, max_new=NEW)
        jax.eval_shape(ms.Decoder(target, drafter).step, weights, state)

    step(model, ms.NgramDrafter(DRAFTS))
    with pytest.raises(ValueError, match=r"Decoder\.step got a cache that still awaits the commit"):
        step(ForgetfulModel(), ms.NgramDrafter(DRAFTS))
    with pytest.raises(ValueError, match=r"after ForgetfulDrafter.update, got a cache that still awaits the commit"):
        step(model, ForgetfulDrafter(DRAFTS, model=model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "got no prompts, expected at least one row"),
        ({"prompts": [[1], []]}, "prompt 1 is empty, expected at least one token"),
        ({"prompts": [[1, 13]]}, r"prompt 0 has token ids 1..13, expected 0..12"),
        ({"prompts": [[0.5]]}, r"prompt 0 is \[0.5\], expected a list of token ids, which are integers"),
        ({"prompts": [1, 2]}, "prompt 0 is 1, expected a list of token ids for each row"),
        ({"max_new": 2**40}, "max_new is 1099511627776, expected at most 1073741824"),
        ({"seeds": [1, 2]}, r"seeds is \[1, 2\], expected an integer or 3 of them"),
        ({"seeds": 0.5}, "seeds is 0.5, expected an integer or 3 of them"),
        ({"num_drafts": 2.5}, "num_drafts is 2.5, expected a number of drafts, 'auto' or a draft policy"),
        ({"max_new": [1, 2]}, r"max_new has shape \[2\], expected one value or 3"),
        ({"max_new": -1}, "max_new is -1, expected finite values of at least 0"),
        ({"max_new": 1.5}, "max_new is 1.5, expected an integer or 3 of them"),
        (
            {"max_new": 2, "min_new": 3, "stops": ms.StopConditions.create([5])},
            r"min_new \[3, 3, 3\] exceeds max_new \[2, 2, 2\]",
        ),
        ({"temperature": float("nan")}, "temperature is nan, expected finite values"),
        ({"num_drafts": "deep"}, "num_drafts is 'deep', expected a number of drafts, 'auto' or a draft policy"),
        ({"num_drafts": -1}, "num_drafts is -1, expected at least 0"),
        (
            {"num_drafts": 4, "drafter": ms.NgramDrafter(2)},
            "is 4, but the drafter proposes at most 2 tokens",
        ),
        ({"chunk_steps": 0}, "chunk_steps is 0, expected at least 1"),
        ({"top_k": 40}, r"top_k is 40, but every temperature is 0"),
        ({"top_p": [1, 0.5, 1]}, r"top_p is \[1, 0.5, 1\], but every temperature is 0"),
        ({"min_p": 0.5}, r"min_p is 0.5, but every temperature is 0"),
        ({"seeds": 3}, "seeds is 3, but every temperature is 0"),
        ({"seeds": 2**32, "temperature": 1}, r"seeds is 4294967296 .*, expected 0..4294967295"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number or 3 of them"),
        ({"temperature": [1, [2], 3]}, "temperature is .*, expected a number or 3 of them"),
        ({"min_new": 2}, "min_new is 2, but nothing ends a row before max_new: give stops"),
        ({"num_drafts": 0, "depth_limit": 2}, "depth_limit is 2, but num_drafts 0 drafts nothing"),
        ({"drafter_params": {}}, "drafter_params came without a drafter"),
        ({"stops": [2]}, r"stops is \[2\], expected StopConditions"),
        ({"stops": ms.StopConditions.create([13])}, "eos_ids contain 13, expected 0..12"),
        ({"prompts": None}, "prompts are None, expected a list of token ids for each row"),
        ({"prompts": "text"}, "prompts are 'text', expected a list of token ids for each row"),
        ({"prompts": ["text"]}, "prompt 0 is 'text', expected a list of token ids for each row"),
        ({"prompts": [None]}, "prompt 0 is None, expected a list of token ids for each row"),
        ({"prompts": [[1, [2]]]}, "prompt 0 is .*, expected a list of token ids"),
    ],
)
def test_bad_requests_are_named(model, params, options, message):
    options = {"prompts": PROMPTS, "max_new": NEW, **options}
    with pytest.raises(ValueError, match=message):
        ms.generate(model, params, options.pop("prompts"), **options)


def test_a_step_deeper_than_its_state_is_refused(model, params):
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(5)), ms.Weights(params)
    state = dataclasses.replace(decoder, num_drafts=2).init(weights, PROMPTS, max_new=NEW)
    with pytest.raises(ValueError, match="num_drafts is 5, but the state was made for at most 2"):
        decoder.step(weights, state)


def test_while_loop_form_gives_the_same(model, params, plain):
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(DRAFTS)), ms.Weights(params)
    some_steps = jax.jit(lambda state: decoder.until_finished(weights, state, max_steps=5))
    state = some_steps(decoder.init(weights, PROMPTS, max_new=NEW))
    assert state.statistics.passes.max() == 5
    while state.active.any():
        state = some_steps(state)
    assert collect(state).tokens == plain


class JudgedOnly:
    """Never drafts, so that every chunk judges what drafts would have been worth."""

    max_drafts = DRAFTS

    def __init__(self):
        self.seen = []

    def start(self, remaining):
        self.remaining = remaining

    def choose(self):
        return 0

    def steps(self, num_drafts, chunk_steps):
        return chunk_steps

    def observe(self, costs):
        self.seen.append(costs)


def test_hindsight_counts_the_leading_drafts_that_came_true(model, params):
    """Eight plain steps a chunk, with a look every other step."""
    drafter, policy, budgets = ms.NgramDrafter(DRAFTS), JudgedOnly(), [22, 2, 9]
    decoder, weights = ms.Decoder(model, drafter), ms.Weights(params)
    state = decoder.init(weights, PROMPTS, max_new=budgets)
    lengths, reports = np.array(state.lengths), []
    ends = lengths + budgets
    propose = jax.jit(lambda tokens, lengths: drafter.propose(None, (), tokens, lengths, None, DRAFTS))
    for newest, report in decode_chunks(decoder, weights, state, policy, 8):
        state = newest
        reports.append(report)
    tokens = np.array(state.tokens)

    judged = []
    for report, costs in zip(reports, policy.seen, strict=True):
        expected = np.full((4, len(PROMPTS)), -1)
        for look, row in np.ndindex(expected.shape):
            at = lengths[row] + 2 * look
            if at < ends[row]:
                proposal = propose(tokens[row : row + 1], np.asarray([at], np.int32))
                count = min(int(proposal.counts[0]), int(report.lengths[row] - at))
                wrong = np.flatnonzero(proposal.tokens[0, :count] != tokens[row, at : at + count])
                expected[look, row] = wrong[0] if wrong.size else count
                judged.append(expected[look, row])
        np.testing.assert_array_equal(report.foreseen, expected)
        np.testing.assert_array_equal(report.remaining, ends - report.lengths)
        for row in range(len(PROMPTS)):
            passes = [1 / (1 + right) for right in expected[:, row] if right >= 0]
            assert costs.passes[row] == len(passes)
            assert costs.tokens[row] == pytest.approx(len(passes) ** 2 / sum(passes) if passes else 0)
        np.testing.assert_array_equal(costs.remaining, report.remaining)
        lengths = report.lengths
    assert len(reports) == 3
    assert {0, DRAFTS} <= set(judged)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "erererer"), ("gpu", "eerererr")])
def test_an_accelerator_gets_its_next_chunk_before_the_last_one_is_read(model, params, monkeypatch, platform, expected):
    """e: a chunk is enqueued; r: a report is read. Sixteen tokens are four chunks of four steps."""
    events = []
    decoder, weights = ms.Decoder(model, ms.NgramDrafter(0)), ms.Weights(params)
    state = decoder.init(weights, PROMPTS, max_new=[16, 3, 5])

    def record(event, function):
        return lambda *args: (events.append(event), function(*args))[1]

    chunks = decode_chunks(decoder, weights, state, chunk_steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(driver.jax, "default_backend", lambda: platform)
        patch.setattr(driver, "program_count", lambda _: 1)
        patch.setattr(driver, "_run_chunk", record("e", driver._run_chunk))
        patch.setattr(driver.jax, "device_get", record("r", jax.device_get))
        for newest, _ in chunks:
            state = newest
    assert "".join(events[1:]) == expected  # the first read is that of the budgets
    np.testing.assert_array_equal(state.new_tokens, [16, 3, 5])
