"""Whatever a drafter says, the text is that of plain decoding; and rows that cannot go on say why."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mamba_spec_jax as ms
from mamba_spec_jax import assets
from mamba_spec_jax.cache.tree import Tree

from .toy import ToyModel

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, K, NEW, ROWS, EXAMPLES = 5, 4, 8, 250, 7
MODEL = ToyModel(V)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(V + 1, V, V)).astype(np.float32)
PROMPTS = RNG.integers(0, V, (ROWS, 2)).tolist()
STRANGE = np.array([-1, V, V + 1, 1024, 99_999, -99_999, 2**31 - 1, -(2**31)], np.int32)


@dataclasses.dataclass(frozen=True)
class Hostile:
    """Says what its parameters hold for a row that has so many new tokens: any integers, and any floats.

    Its state is NaN. Where a script's `own` is set, it chooses tokens of a vocabulary larger than the target's from
    logits made of that state.
    """

    proposes_trees: bool
    with_probs: bool
    max_drafts: int = K
    hidden_layers = ()

    def init(self, batch, max_len):
        return jnp.full((batch, 1, 1), jnp.nan)

    def propose(self, script, state, tokens, lengths, choose, num_drafts):
        at = jnp.clip(lengths - 2, 0, NEW - 1)
        said = {name: leaf[jnp.arange(lengths.size), at] for name, leaf in script.items()}
        positions = lengths[:, None] + jnp.arange(num_drafts)
        own = choose(jnp.zeros((lengths.size, num_drafts, V + 3)).at[..., V + 1].set(9) + state, positions)
        return ms.Proposal(
            tokens=jnp.where(said["own"][:, None], own, said["tokens"]),
            counts=said["counts"],
            state=state,
            probs=said["probs"] if self.with_probs else None,
            parents=said["parents"] if self.proposes_trees else None,
        )

    def update(self, params, state, progress):
        return state


CASES = {
    f"{shape}, {name}": (Hostile(shape == "tree", "probs" in name), method)
    for shape in ("chain", "tree")
    for name, method in {"sampled": ms.Sampling(), "sampled with probs": ms.Sampling(), "greedy": ms.Greedy()}.items()
}


@jax.jit
def decode(decoder, weights, state):
    return decoder.until_finished(weights, state)


def run(table, state, drafter, method, script):
    return decode(ms.Decoder(MODEL, drafter, method, K), ms.Weights(table, script), state)


@functools.cache
def begin(drafter, temperature, limit=K):
    """Before the first step; every other row is greedy where `temperature` is not 0."""
    temperatures = np.where(np.arange(ROWS) % 2, temperature, 0.0)
    options = {"max_new": NEW, "depth_limit": limit, "temperature": temperatures, "logprobs": True}
    return ms.Decoder(MODEL, drafter, ms.Sampling(), K).init(ms.Weights(LOGITS), PROMPTS, **options)


@functools.cache
def plain(case):
    """What the program of this case decodes without drafts."""
    drafter, method = CASES[case]
    state = begin(drafter, 1.0, limit=0)
    return jax.device_get(run(LOGITS, state, drafter, method, right_script(np.zeros((ROWS, 2 + NEW), np.int32))))


def right_script(text):
    """Drafts that are what `text` goes on with, the last node of a tree a second child of the root."""
    at = np.minimum(np.arange(2, 2 + NEW)[:, None] + np.arange(K), text.shape[1] - 1)
    parents = np.tile(np.array([*range(-1, K - 1), 0], np.int32), (ROWS, NEW, 1))
    return {
        "tokens": text[:, at],
        "counts": np.full((ROWS, NEW), K, np.int32),
        "probs": np.full((ROWS, NEW, K, V), 1 / V, np.float32),
        "parents": parents,
        "own": np.zeros((ROWS, NEW), bool),
    }


def hostile_script(rng, text, share):
    """Half of all drafts are right, `share` of all numbers strange, and no distribution is one."""
    script = right_script(text)
    shape = script["tokens"].shape
    parents = rng.integers(-1, K + 1, (ROWS, NEW, K + 1)).astype(np.int32)
    parents = np.where(rng.random(parents.shape) < 0.6, script["parents"], parents)
    tree = np.asarray(Tree.create(parents.reshape(-1, K + 1)).depths).reshape(parents.shape)[..., 1:]
    at = np.clip(np.arange(2, 2 + NEW)[:, None] + tree - 1, 0, text.shape[1] - 1)
    right = np.where(rng.random((ROWS, NEW, 1)) < 0.5, script["tokens"], text[np.arange(ROWS)[:, None, None], at])
    tokens = np.where(rng.random(shape) < 0.3, rng.integers(0, V, shape), right)

    def strange(values):
        return np.where(rng.random(values.shape) < share, rng.choice(STRANGE, values.shape), values).astype(np.int32)

    probs = rng.dirichlet(np.ones(V), shape).astype(np.float32)
    column, rows = rng.integers(0, V, shape), np.indices(shape)
    probs[(*rows, column)] = rng.choice(np.array([np.nan, np.inf, -np.inf, -1, -1e-3, 3, 1e30], np.float32), shape)
    whole = rng.random(shape)[..., None]
    probs = np.where(whole < 0.1, 0, np.where(whole < 0.2, np.nan, np.where(whole < 0.3, 1.0, probs)))
    return script | {
        "tokens": strange(tokens),
        "counts": strange(rng.integers(-2, K + 3, (ROWS, NEW))),
        "probs": probs.astype(np.float32),
        "parents": strange(parents),
        "own": rng.random((ROWS, NEW)) < 0.1,
    }


def assert_same_text(state, expected):
    for name in ("tokens", "lengths", "reasons", "logprobs"):
        np.testing.assert_array_equal(getattr(state, name), getattr(expected, name), err_msg=name)
    np.testing.assert_array_equal(state.cache.lengths, expected.cache.lengths)
    np.testing.assert_array_equal(state.cache.mamba.ssm, expected.cache.mamba.ssm)


@pytest.mark.parametrize("case", list(CASES))
def test_the_text_is_that_of_plain_decoding(case):
    drafter, method = CASES[case]
    expected, state = plain(case), begin(drafter, 1.0)
    accepted, tried = [], []

    @settings(max_examples=EXAMPLES)
    @given(seed=st.integers(0, 2**64 - 1), share=st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    def check(seed, share):
        script = hostile_script(np.random.default_rng(seed), expected.tokens, share)
        got = jax.device_get(run(LOGITS, state, drafter, method, script))
        assert_same_text(got, expected)
        accepted.append(got.statistics.mean_acceptance_length)
        tried.append(ROWS)

    check()
    assert sum(tried) * len(CASES) >= 10_000
    # Nothing is drawn from what is no distribution; elsewhere drafts have to come true, or nothing is tested.
    assert max(accepted) == 1 if drafter.with_probs else max(accepted) > 1.3


@pytest.mark.parametrize("case", [case for case in CASES if "probs" in case])
def test_a_distribution_that_lies_still_gives_tokens_of_the_vocabulary(case):
    """Greedy rows are plain decoding; in the others the target can draw every token, and does."""
    drafter, method = CASES[case]
    rng, expected = np.random.default_rng(1), plain(case)
    script = hostile_script(rng, expected.tokens, 0.0)
    script["probs"] = rng.dirichlet(np.full(V, 0.2), script["tokens"].shape).astype(np.float32)
    got = jax.device_get(run(LOGITS, begin(drafter, 1.0), drafter, method, script))
    np.testing.assert_array_equal(got.tokens[::2], expected.tokens[::2])
    assert got.tokens.min() >= 0
    assert got.tokens.max() < V
    np.testing.assert_array_equal(got.lengths, expected.lengths)
    assert np.isfinite(got.logprobs).all()
    assert got.statistics.mean_acceptance_length > 1.3


@pytest.mark.parametrize("case", list(CASES))
def test_logits_that_choose_no_token_end_the_row(case):
    """What was accepted before stays, and the state with it."""
    drafter, method = CASES[case]
    expected, table = plain(case), LOGITS.copy()
    broken = {(1, 2): (slice(None), np.nan), (3, 3): (1, np.nan), (4, 0): (slice(None), -np.inf), (2, 4): (2, np.inf)}
    for (previous, last), (token, value) in broken.items():
        table[previous + 1, last, token] = value
    got = jax.device_get(run(table, begin(drafter, 1.0), drafter, method, right_script(expected.tokens)))
    ended = 0
    for row in range(ROWS):
        drawn_otherwise = drafter.with_probs and row % 2
        text = (got if drawn_otherwise else expected).tokens[row].tolist()
        end = next((n for n in range(2, 2 + NEW) if tuple(text[n - 2 : n]) in broken), 2 + NEW)
        ended += end < 2 + NEW
        reason = ms.StopReason.NO_LOGITS if end < 2 + NEW else ms.StopReason.MAX_NEW
        assert (got.reasons[row], got.lengths[row], got.cache.lengths[row]) == (reason, end, end - 1)
        np.testing.assert_array_equal(got.tokens[row, :end], text[:end])
        assert not got.tokens[row, end:].any()
        assert int(got.cache.mamba.ssm[0, row, 0, 0, 0]) == text[end - 2] + 1
    assert ROWS / 5 < ended < ROWS
    assert np.isfinite(got.logprobs).all()


@pytest.mark.parametrize("case", ["chain, sampled", "tree, sampled"])
@pytest.mark.parametrize("full", ["cache", "tokens"])
def test_a_row_without_room_stops_with_a_reason(case, full):
    drafter, method = CASES[case]
    expected, room, state = plain(case), 7, begin(drafter, 1.0)
    if full == "cache":
        state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, max_len=room))
    else:
        state = dataclasses.replace(state, tokens=state.tokens[:, : room + 1], logprobs=state.logprobs[:, : room + 1])
    got = jax.device_get(run(LOGITS, state, drafter, method, right_script(expected.tokens)))
    np.testing.assert_array_equal(got.cache.lengths, room)
    np.testing.assert_array_equal(got.lengths, room + 1)  # the last token has not been read yet
    np.testing.assert_array_equal(got.tokens[:, : room + 1], expected.tokens[:, : room + 1])
    np.testing.assert_array_equal(got.reasons, ms.StopReason.NO_ROOM)
    np.testing.assert_array_equal(got.cache.mamba.ssm[0, :, 0, 0, 0], got.tokens[:, room - 1] + 1)
    again = dataclasses.replace(got, reasons=np.zeros_like(got.reasons))
    again = jax.device_get(run(LOGITS, again, drafter, method, right_script(expected.tokens)))
    np.testing.assert_array_equal(again.reasons, ms.StopReason.NO_ROOM)
    assert_same_text(again, got)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Proposes in each row one token, that of its parameters, again and again."""

    max_drafts: int = 3
    hidden_layers = ()
    proposes_trees = False

    def init(self, batch, max_len):
        return ()

    def propose(self, token, state, tokens, lengths, choose, num_drafts):
        return ms.Proposal(jnp.repeat(token[:, None], num_drafts, 1), jnp.full_like(lengths, num_drafts), state)

    def update(self, params, state, progress):
        return state


def test_the_bundled_model_reads_no_token_outside_its_vocabulary():
    loaded = ms.load(assets.TINY)
    said = jnp.asarray([1024, 99_999, -1, -5000, 2**31 - 1, 7], jnp.int32)
    prompts = [loaded.tokenizer.encode("def quicksort(items):").ids] * said.size
    options = {"drafter": Constant(), "drafter_params": said, "max_new": 8}
    expected = ms.generate(loaded.model, loaded.params, prompts, depth_limit=0, **options)
    assert all(expected.tokens[0])
    assert ms.generate(loaded.model, loaded.params, prompts, **options).tokens == expected.tokens


Z = jnp.zeros((1, 2), jnp.int32)
GOOD = ms.Proposal(Z, Z[0, :1], jnp.zeros(1))
SAID = {
    "Says.propose returned a tuple, expected a Proposal": (Z, Z[0], None),
    "Says.propose returned a NoneType, expected a Proposal": None,
    "Says.propose returned tokens of type list, expected int32[1, 2]": GOOD.replace(tokens=[[0, 0]]),
    "Says.propose returned tokens float32[1, 2], expected int32[1, 2]": GOOD.replace(tokens=jnp.zeros((1, 2))),
    "Says.propose returned tokens int32[2], expected int32[1, 2]": GOOD.replace(tokens=Z[0]),
    "Says.propose returned counts of type NoneType, expected int32[1]": GOOD.replace(counts=None),
    "Says.propose returned counts float32[1], expected int32[1]": GOOD.replace(counts=jnp.zeros(1)),
    "Says.propose returned probs of type list, expected float32[1, 2, 5]": GOOD.replace(probs=[0.5]),
    "Says.propose returned probs float32[1, 2, 6], expected float32[1, 2, 5]": GOOD.replace(probs=jnp.zeros((1, 2, 6))),
    "Says.propose returned parents, but its proposes_trees is False": GOOD.replace(parents=Z),
}
FOLLOWED = {
    "Says.update returned PyTreeDef(None), expected a state like the one before, PyTreeDef(*)": None,
    "Says.update returned PyTreeDef((*, *)), expected a state like the one before, PyTreeDef(*)": (Z, Z),
    "Says.update returned state float32[2], expected float32[1] as before": jnp.zeros(2),
    "Says.update returned state int32[1], expected float32[1] as before": Z[0, :1],
}


@pytest.mark.parametrize("message", [*SAID, *FOLLOWED])
def test_garbage_is_named(message):
    class Says(Constant):
        def init(self, batch, max_len):
            return jnp.zeros(batch)

        def propose(self, params, state, tokens, lengths, choose, num_drafts):
            return SAID.get(message, GOOD)

        def update(self, params, state, progress):
            return FOLLOWED.get(message, state)

    def step():
        decoder, weights = ms.Decoder(MODEL, Says(2)), ms.Weights(jnp.asarray(LOGITS))
        return decoder.step(weights, decoder.init(weights, [[1]]))

    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(step)


def test_what_is_no_drafter_is_named():
    with pytest.raises(ValueError, match=r"got a drafter of type dict without max_drafts, .*, expected all that spec"):
        ms.generate(MODEL, LOGITS, [[1]], drafter={})
