"""Verify and commit against decoding token by token, given the same projected inputs: the same bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.cache.pools import HybridCache, MambaPool
from mamba_spec_jax.modes import CommitStrategy, ForwardMode, SpeculativeMode

from .recurrent import (
    SLOTS,
    admitted,
    adopted,
    assert_same_bits,
    assert_same_pool,
    commit,
    decode_history,
    expected_pool,
    forward,
    held,
    make_backend,
    make_inputs,
    make_weights,
    occupied,
)

T = 7  # columns of a verify
TOKENS = 16  # tokens that every request will decode
OWNED = np.array([4, 9, 0, 6, 2], np.int32)  # the slots of five requests; the other six belong to somebody else
PROMPT = np.array([3, 1, 5, 2, 4], np.int32)
ROWS = np.arange(len(OWNED))

CASES = {
    "float32": {"layers": 2},
    "bfloat16": {"ssm_dtype": "bfloat16", "conv_dtype": "bfloat16", "activations": "bfloat16", "conv_width": 3},
    "float16": {"ssm_dtype": "float16", "conv_dtype": "float16", "activations": "float16"},
    "mixed": {"conv_dtype": "bfloat16", "activations": "bfloat16", "conv_width": 2, "dt_limits": (0.3, 0.9)},
    "groups": {"conv_width": 5, "heads": 6, "groups": 3},
    "gated delta rule": {"kind": "gated_delta", "layers": 2, "beta_scale": 2.0},
    "convolution alone": {"kind": "short_conv", "layers": 2, "conv_width": 3},
    "mamba1": {"kind": "mamba1", "ssm_dtype": "bfloat16", "conv_dtype": "bfloat16", "activations": "bfloat16"},
    "decay per channel": {
        "kind": "gated_delta",
        "channel_decay": True,
        "heads": 2,
        "conv_width": 3,
        "ssm_dtype": "bfloat16",
        "conv_dtype": "bfloat16",
        "activations": "bfloat16",
    },
}
SNAPSHOT, REPLAY = CommitStrategy.SNAPSHOT, CommitStrategy.REPLAY
EXACT = [
    *((strategy, case) for strategy in (SNAPSHOT, REPLAY) for case in ("float32", "bfloat16", "float16")),
    (REPLAY, "mixed"),
    (SNAPSHOT, "groups"),
    (REPLAY, "gated delta rule"),
    (SNAPSHOT, "decay per channel"),
    (REPLAY, "mamba1"),
    (SNAPSHOT, "convolution alone"),
]


@dataclasses.dataclass(frozen=True)
class Scene:
    """Five admitted requests, and what decoding TOKENS more tokens one at a time makes of each."""

    decoder: HybridLinearAttnBackend
    weights: tuple
    cache: HybridCache
    inputs: tuple[np.ndarray, ...]
    outputs: np.ndarray
    history: MambaPool

    def verify(self, backend, cache, slots, num_tokens, requests, done):
        """One pass over `requests [B]`, each from its own token `done[b]` on; all else that it could read is NaN."""
        windows = []
        for leaf in self.inputs:
            window = np.full((leaf.shape[0], len(slots), T, *leaf.shape[3:]), np.nan, leaf.dtype)
            for row, (slot, count) in enumerate(zip(slots, num_tokens, strict=True)):
                if slot >= 0:
                    start = done[row]
                    window[:, row, :count] = leaf[:, requests[row], start : start + count]
            windows.append(window)
        return forward(
            backend,
            ForwardMode.TARGET_VERIFY,
            cache,
            self.weights,
            jnp.asarray(slots),
            jnp.asarray(num_tokens),
            *windows,
        )


@functools.cache
def make_scene(case: str) -> Scene:
    options = CASES[case]
    decoder = make_backend(SNAPSHOT, **options)
    activations = options.get("conv_dtype", "float32")
    weights = make_weights(decoder, dtype=activations)
    if case == "float32":
        prompt = make_inputs(decoder, len(OWNED), int(PROMPT.max()), seed=3)
        cache = admitted(decoder, weights, OWNED, prompt, PROMPT)
    else:
        cache = occupied(decoder, OWNED, PROMPT)
    inputs = make_inputs(decoder, len(OWNED), TOKENS, seed=4, dtype=activations)
    # The rows in another order than any verify has them: a row's place in the batch must not matter.
    outputs, history = decode_history(decoder, weights, cache, OWNED[::-1], [leaf[:, ::-1] for leaf in inputs])
    history = jax.tree.map(lambda leaf: leaf[:, ::-1], history)
    return Scene(decoder, weights, cache, inputs, outputs[:, ::-1], history)


@pytest.mark.parametrize(("strategy", "case"), EXACT)
def test_every_accept_length_equals_decoding(strategy, case):
    scene = make_scene(case)
    backend = make_backend(strategy, **CASES[case])
    before = adopted(backend, scene.cache, OWNED)
    everything = np.full(len(OWNED), T, np.int32)
    outputs, cache, record = scene.verify(backend, before, OWNED, everything, ROWS, 0 * ROWS)
    assert_same_bits(outputs, scene.outputs[:, :, :T], "outputs")
    assert_same_pool(held(backend, cache, OWNED), scene.cache.mamba, "before the commit")
    np.testing.assert_array_equal(cache.lengths, scene.cache.lengths)

    for accepted in range(T + 1):  # 0 keeps every row as it is
        after = commit(backend, cache, record, np.full(len(OWNED), accepted - 1, np.int32))
        expected = expected_pool(scene.cache.mamba, scene.history, [(OWNED[b], b, accepted) for b in ROWS])
        assert_same_pool(held(backend, after, OWNED), expected, f"after accepting {accepted}")
        gained = np.where(np.isin(np.arange(SLOTS), OWNED), accepted, 0)
        np.testing.assert_array_equal(after.lengths, scene.cache.lengths + gained)

    # A different length each, and nodes that no real token stands at: past the row's tokens, past T, negative.
    ragged = np.array([3, 1, T, 5, 2], np.int32)
    _, cache, record = scene.verify(backend, before, OWNED, ragged, ROWS, 0 * ROWS)
    for steps in ([2, 0, 6, 4, 1], [0, 1, -1, 4, 2], [2, -7, T, 1, 99]):
        after = commit(backend, cache, record, jnp.asarray(steps, jnp.int32))
        accepted = [step + 1 if 0 <= step < count else 0 for step, count in zip(steps, ragged, strict=True)]
        expected = expected_pool(scene.cache.mamba, scene.history, [(OWNED[b], b, accepted[b]) for b in ROWS])
        assert_same_pool(held(backend, after, OWNED), expected, f"after steps {steps}")


@pytest.mark.parametrize("case", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [SNAPSHOT, REPLAY])
def test_many_steps_with_zero_draft_and_padding_rows(strategy, case):
    """Rows move about the batch, some without drafts next to others that accept many, some padding or stuck."""
    scene = make_scene(case)
    backend = make_backend(strategy, **CASES[case])
    before = adopted(backend, scene.cache, OWNED)
    rng = np.random.default_rng(5)
    cache, done = before, np.zeros(len(OWNED), np.int32)
    kinds = set()
    traces = None
    for cycle in range(12):
        order = rng.permutation(len(OWNED))
        remaining = TOKENS - done[order]
        padding = (rng.random(len(OWNED)) < 0.2) | (remaining == 0)
        drafts = np.where(rng.random(len(OWNED)) < 0.4, 0, rng.integers(0, T, len(OWNED)))
        num_tokens = np.minimum(drafts + 1, remaining).astype(np.int32)
        accepted = np.where(padding, 0, rng.integers(1, np.maximum(num_tokens, 1) + 1))
        slots = np.where(padding, -1, OWNED[order]).astype(np.int32)
        outputs, verified, record = scene.verify(backend, cache, slots, num_tokens, order, done[order])
        nothing = commit(backend, verified, record, jnp.full(len(OWNED), -1, jnp.int32))
        assert_same_pool(held(backend, nothing, OWNED), held(backend, cache, OWNED), "with nothing accepted")
        # A padding row's step is as arbitrary as its tokens.
        steps = np.where(padding, rng.integers(-1, T, len(OWNED)), accepted - 1)
        cache = commit(backend, verified, record, jnp.asarray(steps, jnp.int32))
        for row in np.flatnonzero(~padding):
            b, start = order[row], done[order[row]]
            assert_same_bits(
                outputs[:, row, : num_tokens[row]], scene.outputs[:, b, start : start + num_tokens[row]], "outputs"
            )
            kinds.add("plain" if num_tokens[row] == 1 else "all" if accepted[row] == num_tokens[row] else "part")
        done[order] += accepted.astype(np.int32)
        expected = expected_pool(scene.cache.mamba, scene.history, [(OWNED[b], b, done[b]) for b in ROWS])
        assert_same_pool(held(backend, cache, OWNED), expected, f"after cycle {cycle}")
        np.testing.assert_array_equal(np.asarray(cache.lengths)[OWNED], PROMPT + done)
        traces = traces or (forward._cache_size(), commit._cache_size())
        assert (forward._cache_size(), commit._cache_size()) == traces, "a new trace for new lengths"
    assert kinds == {"plain", "all", "part"}
    assert done.max() == TOKENS


@pytest.mark.parametrize("case", ["float32", "float16"])
@pytest.mark.parametrize("strategy", [SNAPSHOT, REPLAY])
def test_tracked_slots_receive_the_state_at_their_node(strategy, case):
    scene = make_scene(case)
    backend = make_backend(strategy, **CASES[case])
    before = adopted(backend, scene.cache, OWNED)
    num_tokens = np.array([T, 1, 5, T, 3], np.int32)
    slots = np.array([4, 9, 0, -1, 2], np.int32)
    outside = np.where(ROWS == 1, SLOTS, slots).astype(np.int32)
    _, cache, record = scene.verify(backend, before, slots, num_tokens, ROWS, 0 * ROWS)
    steps = [5, 0, 4, 3, -1]
    # Before the accepted node, at it, no slot, a padding row, and a row that accepts nothing but publishes a state.
    track_slots, track_steps = [1, 3, -1, 5, 7], [2, 0, 1, 1, 1]
    after = commit(backend, cache, record, *(jnp.asarray(v, jnp.int32) for v in (steps, track_slots, track_steps)))
    live = [(4, 0, 6), (9, 1, 1), (0, 2, 5)]
    tracked = [(1, 0, 3), (3, 1, 1), (7, 4, 2)]
    assert_same_pool(held(backend, after, OWNED), expected_pool(scene.cache.mamba, scene.history, live + tracked))
    gained = np.zeros(SLOTS, np.int32)
    gained[[4, 9, 0]] = [6, 1, 5]
    np.testing.assert_array_equal(after.lengths, scene.cache.lengths + gained, err_msg="tracked slots own no tokens")

    # A row without a slot has no old state to start from, so it publishes nothing either.
    after = commit(
        backend,
        cache,
        record.replace(slots=jnp.asarray(outside)),
        *(jnp.asarray(v, jnp.int32) for v in (steps, track_slots, track_steps)),
    )
    kept = [target for target in live + tracked if target[1] != 1]
    assert_same_pool(held(backend, after, OWNED), expected_pool(scene.cache.mamba, scene.history, kept))

    # Nodes that must publish nothing: past the real tokens, past T, negative; and a slot out of range.
    track_slots, track_steps = [1, 3, 5, 7, SLOTS], [T, 1, -1, 0, 0]
    after = commit(backend, cache, record, *(jnp.asarray(v, jnp.int32) for v in (steps, track_slots, track_steps)))
    assert_same_pool(held(backend, after, OWNED), expected_pool(scene.cache.mamba, scene.history, live))


@pytest.mark.parametrize(("strategy", "case"), [
    (SNAPSHOT, "groups"), (SNAPSHOT, "float32"), (REPLAY, "float32"), (SNAPSHOT, "gated delta rule")
])  # fmt: skip
def test_chunked_verify_is_close_to_decoding(strategy, case):
    scene = make_scene(case)
    backend = make_backend(strategy, SpeculativeMode.PREFILL, **CASES[case])
    before = adopted(backend, scene.cache, OWNED)
    everything = np.full(len(OWNED), T, np.int32)
    outputs, cache, record = scene.verify(backend, before, OWNED, everything, ROWS, 0 * ROWS)
    np.testing.assert_allclose(outputs, scene.outputs[:, :, :T], rtol=1e-5, atol=1e-5)
    assert_same_pool(held(backend, cache, OWNED), scene.cache.mamba, "before the commit")
    for accepted in range(T + 1):
        after = commit(backend, cache, record, np.full(len(OWNED), accepted - 1, np.int32))
        expected = expected_pool(scene.cache.mamba, scene.history, [(OWNED[b], b, accepted) for b in ROWS])
        states = held(backend, after, OWNED)
        np.testing.assert_allclose(states.ssm, expected.ssm, rtol=1e-5, atol=1e-5)
        assert_same_bits(states.conv, expected.conv, "windows hold inputs, which no form computes")


@pytest.mark.parametrize("case", ["float32", "gated delta rule"])
def test_prefill_is_close_to_decoding_in_any_chunks(case):
    """A prompt in chunks, the last of one token, leaves what decoding it token by token leaves."""
    scene = make_scene(case)
    slots = jnp.asarray(OWNED)
    for chunks in ([5, 5, 5, 1], [TOKENS]):
        cache, start = scene.cache, 0
        for size in chunks:
            inputs = [leaf[:, :, start : start + size] for leaf in scene.inputs]
            outputs, cache, record = forward(
                scene.decoder,
                ForwardMode.EXTEND,
                cache,
                scene.weights,
                slots,
                np.full(len(OWNED), size, np.int32),
                *inputs,
            )
            assert record is None
            np.testing.assert_allclose(outputs, scene.outputs[:, :, start : start + size], rtol=1e-5, atol=1e-5)
            start += size
        assert start <= TOKENS
        expected = expected_pool(scene.cache.mamba, scene.history, [(OWNED[b], b, start) for b in ROWS])
        np.testing.assert_allclose(cache.mamba.ssm, expected.ssm, rtol=1e-5, atol=1e-5)
        assert_same_bits(cache.mamba.conv, expected.conv)
        np.testing.assert_array_equal(np.asarray(cache.lengths)[OWNED], PROMPT + start)


def test_a_slot_forgets_its_last_owner():
    """Admission into slots full of NaNs ends where admission into an empty cache ends, to the bit."""
    scene = make_scene("float32")
    prompt = make_inputs(scene.decoder, len(OWNED), int(PROMPT.max()), seed=3)
    empty = HybridCache.create(scene.decoder.pool_spec, SLOTS, 64)
    slots, counts = jnp.asarray(OWNED), jnp.asarray(PROMPT)
    fresh = forward(scene.decoder, ForwardMode.EXTEND, empty, scene.weights, slots, counts, *prompt)[1]
    for name in ("ssm", "conv"):
        clean, reused = (np.asarray(getattr(cache.mamba, name)) for cache in (fresh, scene.cache))
        assert_same_bits(reused[:, OWNED], clean[:, OWNED], name)
        others = np.setdiff1d(np.arange(SLOTS), OWNED)
        assert np.isnan(reused[:, others]).all(), "nobody else's slot was touched"
    np.testing.assert_array_equal(np.asarray(scene.cache.lengths)[OWNED], PROMPT)
