"""Acceptance: the greedy walk against an oracle, both rules of sampling at their edges, and rows that do not mix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_spec_jax.cache.records import Draft
from mamba_spec_jax.speculative import acceptance
from mamba_spec_jax.speculative.acceptance import accept, residual
from mamba_spec_jax.speculative.sampling import (
    Filters,
    Greedy,
    Purpose,
    Sampling,
    draw_keys,
    draw_tokens,
    filtered_log_probs,
)

B, T, V = 6, 4, 5
SEEDS = jnp.arange(B, dtype=jnp.uint32) * 7 + 1
POSITIONS = jnp.arange(B)[:, None] * 3 + jnp.arange(T)
ONES = jnp.ones((B,))
NOISE = {"seeds": SEEDS, "positions": POSITIONS}

jit_accept = jax.jit(accept, static_argnames=("method", "with_logprobs"))


def run(logits, draft, method=Sampling(), forbidden=None, temperature=ONES, **noise):  # noqa: B008, frozen
    """`accept` with every argument given, so that cases of one shape share a program."""
    forbidden = np.zeros(logits.shape, bool) if forbidden is None else forbidden
    options = {"temperature": temperature, "forbidden": forbidden, **(noise or NOISE), "filters": filters(len(logits))}
    logits, draft, options = jax.tree.map(np.asarray, (logits, draft, options))  # no weakly typed arrays
    return jit_accept(method, logits, draft, with_logprobs=True, **options)


def filters(batch):
    return Filters.create(batch, top_k=4, top_p=0.95, min_p=0.01)


def take(tree, rows):
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def make_draft(tokens, lengths, slots=None, probs=None):
    slots = np.arange(len(tokens)) if slots is None else slots
    return Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths), jnp.asarray(slots), probs)


def random_case(seed, with_probs):
    """Drafts drawn from their own distribution, ragged lengths, logits close enough for accepts and rejects."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(B, T, V)), jnp.float32)
    probs = rng.dirichlet(np.ones(V), (B, T - 1)).astype(np.float32)
    tokens = np.concatenate([rng.integers(0, V, (B, 1)), (probs.cumsum(2) < rng.random((B, T - 1, 1))).sum(2)], axis=1)
    lengths = rng.integers(0, T, B)
    return logits, make_draft(np.minimum(tokens, V - 1), lengths, probs=jnp.asarray(probs) if with_probs else None)


@jax.jit
def jit_drawn_tokens(logits, temperature):
    log_probs = filtered_log_probs(logits, temperature, filters(B))
    return draw_tokens(draw_keys(SEEDS, POSITIONS, Purpose.TOKEN), log_probs)


def drawn_tokens(logits, temperature=ONES):
    """What plain sampling emits at each node."""
    return np.asarray(jit_drawn_tokens(np.asarray(logits), np.asarray(temperature)))


def check_consistent(result):
    """What holds of every result: the lengths agree, and columns past them are -1."""
    np.testing.assert_array_equal(result.last_correct_step_indices, result.accept_lens - 1)
    emitted = np.arange(result.tokens.shape[1]) < np.asarray(result.accept_lens)[:, None]
    np.testing.assert_array_equal(np.asarray(result.tokens) >= 0, emitted)
    assert result.tokens.dtype == result.accept_lens.dtype == result.last_correct_step_indices.dtype == jnp.int32


def greedy_oracle(best, tokens, length):
    accepted = 0
    while accepted < min(length, T - 1) and tokens[accepted + 1] == best[accepted]:
        accepted += 1
    return best[: accepted + 1]


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_greedy_walk(data):
    row = st.lists(st.integers(0, V - 1), min_size=T, max_size=T)
    best = data.draw(st.lists(row, min_size=B, max_size=B))
    wrong = data.draw(
        st.lists(st.lists(st.sampled_from([0, 0, 0, 1, -9, V]), min_size=T, max_size=T), min_size=B, max_size=B)
    )
    lengths = data.draw(st.lists(st.integers(0, T + 1), min_size=B, max_size=B))
    slots = data.draw(st.lists(st.integers(-1, 4), min_size=B, max_size=B))
    # Drafts follow the argmax but for an offset: by one, or out of the vocabulary.
    tokens = [[0, *(b + w for b, w in zip(bs, ws, strict=True))][:T] for bs, ws in zip(best, wrong, strict=True)]
    result = run(5 * np.eye(V, dtype=np.float32)[np.array(best)], make_draft(tokens, lengths, slots), Greedy())
    check_consistent(result)
    for b in range(B):
        expected = greedy_oracle(best[b], tokens[b], lengths[b]) if slots[b] >= 0 else []
        assert result.tokens[b, : result.accept_lens[b]].tolist() == expected


@pytest.mark.parametrize("with_probs", [False, True])
def test_rows_at_temperature_zero_walk_greedily(with_probs):
    logits, draft = random_case(0, with_probs)
    best = jnp.argmax(logits, axis=-1)
    draft = dataclasses.replace(
        draft,
        tokens=draft.tokens.at[:, 1:].set(best[:, :-1]).at[1, 2].set((best[1, 1] + 1) % V),
        counts=jnp.array([0, 3, 1, 3, 2, 3]),
    )
    expected = run(logits, draft, Greedy())
    assert expected.accept_lens.tolist() == [1, 2, 2, 4, 3, 4]
    temperature = jnp.array([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    got = run(logits, draft, temperature=temperature)
    cold = np.asarray(temperature) == 0
    for name in ("tokens", "accept_lens", "last_correct_step_indices"):
        np.testing.assert_array_equal(np.asarray(getattr(got, name))[cold], np.asarray(getattr(expected, name))[cold])


def test_point_mass_drafts_leave_plain_sampling_unchanged():
    for seed in range(5):
        logits, draft = random_case(seed, with_probs=False)
        plain = drawn_tokens(logits)
        right = dataclasses.replace(draft, tokens=draft.tokens.at[:, 1:].set(plain[:, :-1]))
        wrong_at = np.array([1, 2, 3, 1, 2, 3])
        wrong = dataclasses.replace(
            right, tokens=right.tokens.at[np.arange(B), wrong_at].set((plain[np.arange(B), wrong_at - 1] + 1) % V)
        )
        for case, lengths in ((right, draft.counts), (wrong, np.minimum(draft.counts, wrong_at - 1)), (draft, None)):
            result = run(logits, case)
            check_consistent(result)
            emitted = np.arange(T) < np.asarray(result.accept_lens)[:, None]
            np.testing.assert_array_equal(np.asarray(result.tokens)[emitted], plain[emitted])
            if lengths is not None:
                np.testing.assert_array_equal(result.accept_lens, lengths + 1)


def test_rejection_accepts_and_corrects_by_its_rule():
    """Rows whose outcome is certain: the support of p and q decides."""
    p = np.array([0.5, 0.5, 0.0, 0.0, 0.0])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (B, T, V))
    q = {
        "equal": p,
        "disjoint": np.array([0.0, 0.0, 1.0, 0.0, 0.0]),
        "point": np.array([1.0, 0.0, 0.0, 0.0, 0.0]),
        "never drawn": np.array([0.0, 0.5, 0.5, 0.0, 0.0]),
    }
    rows = [("equal", 0), ("disjoint", 2), ("point", 0), ("never drawn", 0), ("equal", 1), ("equal", V)]
    probs = jnp.asarray(np.stack([[q[name]] * (T - 1) for name, _ in rows]), jnp.float32)
    tokens = [[0, *([token] * (T - 1))] for _, token in rows]
    lengths = []
    for start in range(0, 400, 10):
        draft = make_draft(tokens, [3, 3, 3, 3, 0, 3], probs=probs)
        result = run(logits, draft, seeds=SEEDS, positions=POSITIONS + start)
        check_consistent(result)
        lengths.append(np.asarray(result.accept_lens))
        emitted = np.asarray(result.tokens)
        assert set(emitted[emitted >= 0]) <= {0, 1}  # only what the target can emit
        if result.accept_lens[2] < T:
            assert emitted[2, result.accept_lens[2] - 1] == 1  # the residual of a point mass is without it
    lengths = np.stack(lengths)
    assert np.all(lengths[:, 0] == T)  # p >= q
    assert np.all(lengths[:, [1, 3, 4, 5]] == 1)  # p = 0, never drawn from q, no drafts, out of the vocabulary
    assert set(lengths[:, 2]) == {1, 2, 3, 4}  # accepted half the time


def test_ends_of_the_uniform_draw(monkeypatch):
    """At 0 a draft that the target cannot emit is still refused; next to 1 equal distributions still accept."""
    p = np.array([0.25, 0.75, 0.0, 0.0, 0.0])
    q = np.array([p, [0.0, 0.0, 1.0, 0.0, 0.0], [0.75, 0.25, 0.0, 0.0, 0.0]])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (3, T, V))
    probs = jnp.asarray(np.stack([q] * (T - 1), axis=1), jnp.float32)
    draft = make_draft([[0, 1, 1, 1], [0, 2, 2, 2], [0, 0, 0, 0]], [3] * 3, probs=probs)

    @jax.jit
    def accept_at(uniform):
        monkeypatch.setattr(acceptance, "draw_uniforms", lambda keys: jnp.full(keys.shape, uniform, jnp.float32))
        return accept(Sampling(), logits, draft, seeds=SEEDS[:3], positions=POSITIONS[:3], temperature=ONES[:3])

    for uniform, accepted in ((0.0, [3, 0, 3]), (1 - 2**-24, [3, 0, 0])):
        result = accept_at(np.float32(uniform))
        assert (result.accept_lens - 1).tolist() == accepted
        assert result.tokens[1, 0] in (0, 1)


def test_residual():
    p = jnp.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [1.0, 0.0, 0.0]])
    q = jnp.array([[0.2, 0.6, 0.2], [0.5, 0.3, 0.2], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(residual(p, q), [[0.3, 0, 0], [0.5, 0.3, 0.2], [1, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("with_probs", [False, True])
def test_rows_do_not_mix(with_probs):
    """Permuting rows, or taking one alone and with a smaller T, changes nothing in them."""
    temperature = np.array([1.0, 0.0, 0.5, 2.0, 1.0, 1.0], np.float32)
    order = np.array([3, 0, 5, 1, 4, 2])
    lengths_seen = set()
    for seed in range(4):
        logits, draft = random_case(10 + seed, with_probs)
        if not with_probs:  # the first drafts right, or a random one would seldom be
            plain = drawn_tokens(logits, temperature)
            draft = dataclasses.replace(draft, tokens=draft.tokens.at[:, 1:3].set(plain[:, :2]))
        draft = dataclasses.replace(draft, counts=np.minimum(draft.counts, 2))
        case = jax.tree.map(np.asarray, (logits, draft, NOISE))
        whole = run(case[0], case[1], temperature=temperature, **case[2])
        check_consistent(whole)
        lengths_seen |= set(whole.accept_lens.tolist())

        logits, draft, noise = take(case, order)
        permuted = run(logits, draft, temperature=temperature[order], **noise)
        jax.tree.map(np.testing.assert_array_equal, permuted, take(whole, order))

        for row in range(B):
            logits, draft, noise = take(case, slice(row, row + 1))
            probs = None if draft.probs is None else draft.probs[:, :2]
            short = dataclasses.replace(draft, tokens=draft.tokens[:, :3], probs=probs)
            noise["positions"] = noise["positions"][:, :3]
            alone = run(logits[:, :3], short, temperature=temperature[row : row + 1], **noise)
            np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row, :3])
            np.testing.assert_array_equal(alone.accept_lens[0], whole.accept_lens[row])
    assert lengths_seen == {1, 2, 3}


@pytest.mark.parametrize("with_probs", [False, True])
def test_without_drafts_it_is_a_decode_step(with_probs):
    logits, _ = random_case(3, False)
    probs = jnp.zeros((B, 0, V)) if with_probs else None
    draft = make_draft([[0]] * B, [0] * B, [0, 1, 2, -1, 4, 5], probs)
    result = run(logits[:, :1], draft, seeds=SEEDS, positions=POSITIONS[:, :1])
    assert result.accept_lens.tolist() == [1, 1, 1, 0, 1, 1]
    expected = drawn_tokens(logits)[:, :1].copy()
    expected[3] = -1
    np.testing.assert_array_equal(result.tokens, expected)
    greedy = run(logits[:, :1], make_draft([[0]] * B, [0] * B), Greedy(), seeds=SEEDS, positions=POSITIONS[:, :1])
    np.testing.assert_array_equal(greedy.tokens[:, 0], jnp.argmax(logits[:, 0], axis=-1))


@pytest.mark.parametrize("method", [Greedy(), Sampling()])
@pytest.mark.parametrize("with_probs", [False, True])
def test_forbidden_tokens_are_neither_accepted_nor_emitted(method, with_probs):
    logits, draft = random_case(4, with_probs)
    logits = logits.at[:, :, 2].set(8.0)
    draft = dataclasses.replace(draft, tokens=draft.tokens.at[:, 1:].set(2), counts=jnp.full((B,), T - 1))
    free = run(logits, draft, method)
    assert np.all(free.accept_lens > 1)
    forbidden = jnp.zeros((B, T, V), bool).at[:, 1, 2].set(True)
    result = run(logits, draft, method, forbidden)
    assert np.all(result.accept_lens == 2)
    assert np.all(result.tokens[:, 0] == 2)
    assert np.all(result.tokens[:, 1] != 2)


def test_log_probs_are_the_targets_own():
    logits, draft = random_case(5, True)
    forbidden = jnp.zeros((B, T, V), bool).at[:, :, 0].set(True)
    result = run(logits, draft, forbidden=forbidden, temperature=2 * ONES)
    expected = jax.nn.log_softmax(logits, axis=-1)
    for b, t in np.ndindex(B, T):
        if t < result.accept_lens[b]:
            np.testing.assert_allclose(result.logprobs[b, t], expected[b, t, result.tokens[b, t]], rtol=1e-6)
        else:
            assert result.logprobs[b, t] == 0
    assert jax.eval_shape(functools.partial(accept, Greedy()), logits, draft).logprobs is None


def test_64_bit_mode_draws_the_same():
    logits, draft = random_case(6, True)
    expected = run(logits, draft)
    with jax.enable_x64(True):
        got = run(logits, draft)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, expected)


LOGITS = jnp.zeros((B, T, V))
DRAFT = make_draft(np.zeros((B, T)), np.zeros(B, np.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accept(Sampling(), LOGITS, DRAFT), "needs seeds, positions and temperature"),
        (lambda: accept("greedy", LOGITS, DRAFT), "accept got method 'greedy'"),
        (lambda: accept(Greedy(), LOGITS[:, 0], DRAFT), r"logits float32\[6, 5\], expected float32\[B, T, V\]"),
        (lambda: accept(Greedy(), LOGITS[:, :2], DRAFT), r"draft.tokens int32\[6, 4\], expected int32\[6, 2\]"),
        (
            lambda: accept(Greedy(), LOGITS, dataclasses.replace(DRAFT, probs=jnp.zeros((B, T, V)))),
            r"draft.probs float32\[6, 4, 5\], expected float32\[6, 3, V\]",
        ),
        (
            lambda: accept(Sampling(), LOGITS, DRAFT, temperature=jnp.ones(()), **NOISE),
            r"temperature float32\[\], expected float32\[6\]",
        ),
        (
            lambda: accept(Sampling(), LOGITS, DRAFT, temperature=ONES, filters=Filters.create(2), **NOISE),
            r"filters.top_k int32\[2\], expected int32\[6\]",
        ),
        (
            lambda: accept(Greedy(), LOGITS, DRAFT, forbidden=jnp.zeros((V,), bool)),
            r"forbidden bool\[5\], expected bool\[6, 4, 5\]",
        ),
    ],
)
def test_errors_say_what_came_and_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()
