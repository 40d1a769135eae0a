"""Drafting with heads: drafts against a forward pass without a cache; and that nothing of them shows in the output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mamba_spec_jax as ms
from mamba_spec_jax.models.heads.head import DFlashHead, EagleHead
from mamba_spec_jax.speculative.drafters.dflash import DFlashDrafter
from mamba_spec_jax.speculative.drafters.eagle import EagleDrafter
from mamba_spec_jax.speculative.drafters.eagle_tree import EagleTreeDrafter
from mamba_spec_jax.speculative.protocol import Progress
from mamba_spec_jax.speculative.sampling import TokenChoice
from tests.mamba_spec_jax import tiny
from tests.mamba_spec_jax.heads import KINDS, head_config, random_module
from tests.mamba_spec_jax.speculative.drafting import QUICKLY, quick_prefills, run, texts

TARGET = ms.HybridModel.create(tiny.DENSE)
PARAMS = tiny.random_params(TARGET)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9, 3]]
NEW, DRAFTS, MASK = 12, 4, 7
LENGTH = 24  # tokens of every buffer: one shape, one program
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@functools.cache
def drafting(kind, tree=False):
    """A drafter, its weights, its module, and the target that returns what it reads."""
    config = head_config(kind, TARGET)
    module = random_module(kind, config)
    static = DFlashHead if kind == "dflash" else EagleHead
    head = static.create(KINDS[kind][0], config)
    embedding = PARAMS["embed_tokens"]["embedding"][...]
    params = head.bind(nnx.split(module)[1], embedding, PARAMS["lm_head"]["kernel"][...])
    if kind == "dflash":
        drafter = DFlashDrafter(head, DRAFTS, MASK)
    else:
        drafter = EagleTreeDrafter(head, 9, depth=3, width=3) if tree else EagleDrafter(head, DRAFTS)
    return drafter, params, module, dataclasses.replace(TARGET, hidden_layers=drafter.hidden_layers)


EVERY = [*((kind, False) for kind in KINDS), ("eagle3", True)]
# The first row is greedy.
REQUESTS = {"prompts": PROMPTS, "max_new": [NEW] * 3, "temperature": [0, 0.8, 0.8], "top_k": 9, "seeds": 5}


@functools.cache
def plain():
    return texts(run(TARGET, PARAMS, ms.NgramDrafter(DRAFTS), None, ms.Sampling(), 0, **REQUESTS))


@pytest.mark.parametrize(("kind", "tree"), EVERY)
def test_output_is_that_of_plain_decoding(kind, tree, monkeypatch):
    quick_prefills(monkeypatch)
    drafter, params, _, target = drafting(kind, tree)
    if tree or kind == "dflash":
        replaying = ms.HybridModel.create(tiny.DENSE, strategy=ms.CommitStrategy.REPLAY)
        target = replaying.with_hidden_layers(drafter.hidden_layers)
    state = run(target, PARAMS, drafter, params, ms.Sampling(), drafter.max_drafts, **REQUESTS)
    assert texts(state) == plain()
    assert state.statistics.drafted.min() > 0


def causal(inputs):
    """Attention of a whole sequence to itself."""
    B, T, _, size = inputs.query.shape
    query = inputs.query.reshape(B, T, inputs.key.shape[2], -1, size)
    scores = jnp.einsum("btgrd,bsgd->bgrts", query, inputs.key) / np.sqrt(size)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bgrts,bsgd->btgrd", jax.nn.softmax(scores, -1), inputs.value).reshape(inputs.query.shape)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def prefill(target, window, count):
    cache = target.init_cache(1, LENGTH)
    return target.prefill(PARAMS, window, cache, slots=jnp.zeros(1, jnp.int32), num_tokens=count).hidden


def padded(text):
    return jnp.asarray([text + [0] * (LENGTH + 1 - len(text))], jnp.int32)


def target_hidden(target, text):
    """What the target's layers say of all but the last token of a text, and of padding behind it."""
    return prefill(target, padded(text)[:, :-1], jnp.asarray([len(text) - 1], jnp.int32))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def update(drafter, params, state, progress):
    return drafter.update(params, state, progress)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def propose(drafter, params, state, tokens, length):
    choose = TokenChoice(jnp.zeros(1, jnp.uint32), jnp.ones(1), ms.Greedy())
    return drafter.propose(params, state, tokens, length, choose, drafter.max_drafts)


def followed(kind, text, tree=False):
    """The drafter's state after a text that was read in one piece."""
    drafter, params, _, target = drafting(kind, tree)
    tokens, counts = padded(text), jnp.asarray([len(text) - 1], jnp.int32)
    progress = Progress(tokens[:, :-1], tokens[:, 1:], target_hidden(target, text), counts, ms.ForwardMode.EXTEND)
    return update(drafter, params, drafter.init(1, LENGTH), progress)


def proposed(kind, state, text, tree=False):
    drafter, params, _, _ = drafting(kind, tree)
    return propose(drafter, params, state, padded(text), jnp.asarray([len(text)], jnp.int32))


@functools.cache
def runner(kind, layer):
    """One layer of a head over a whole sequence, and what the head says at its end."""
    drafter, params, module, _ = drafting(kind)
    graphdef, weights = nnx.split(module)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def run(tokens, hidden, count):
        module = nnx.merge(graphdef, weights)
        embedded = params["embedding"][tokens] * drafter.head.config.embedding_multiplier
        said = module.layer(layer)(embedded[None], hidden[None], jnp.arange(LENGTH)[None], causal)[0]
        return said, module.logits(said[count - 1], params["output"])

    def on(tokens, hidden):
        """Of lists of tokens and hidden states, which are padded here."""
        count = len(tokens)
        rows = np.zeros((LENGTH, drafter.head.config.hidden_size), np.float32)
        rows[:count] = hidden[:count]
        said, logits = run(np.asarray(tokens + [0] * (LENGTH - count), np.int32), rows, count)
        return np.asarray(said)[:count], np.asarray(logits)

    return on


def drafts_without_cache(kind, text):
    """The chain of drafts, every step computed over the whole text."""
    drafter, _, module, target = drafting(kind)
    layers = drafter.head.config.num_layers
    tokens = [text[1:] for _ in range(layers)]
    hidden, first = [np.asarray(module.features(target_hidden(target, text))[0])], None
    for layer in range(layers):
        said, logits = runner(kind, layer)(tokens[layer], hidden[layer])
        first = (said[-1], logits) if first is None else first
        # The next layer reads the newest token beside what this one said one position earlier.
        hidden.append(np.concatenate([np.zeros_like(said[:1]), said[:-1]]))
    newest, logits = first
    drafts = [int(np.argmax(logits))]
    for step in range(1, DRAFTS):
        layer = min(step, layers - 1)
        tokens[layer] = [*tokens[layer], drafts[-1]]
        hidden[layer] = np.concatenate([hidden[layer][: len(tokens[layer]) - 1], newest[None]])
        said, logits = runner(kind, layer)(tokens[layer], hidden[layer])
        newest = said[-1]
        drafts.append(int(np.argmax(logits)))
    return drafts


@pytest.mark.parametrize("kind", ["eagle3", "one layer", "three layers"])
def test_drafts_are_those_of_a_forward_pass_without_a_cache(kind):
    for text in PROMPTS[::2]:
        proposal = proposed(kind, followed(kind, text), text)
        assert proposal.tokens[0].tolist() == drafts_without_cache(kind, text)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_block_is_that_of_forward_passes_without_a_cache(passes):
    drafter, params, module, target = drafting("dflash")
    text = PROMPTS[0]
    features = module.features(target_hidden(target, text))[:, : len(text) - 1]
    positions = jnp.arange(len(text) + DRAFTS)[None]
    read, block = positions[:, : len(text) - 1], positions[:, len(text) - 1 :]

    def attend_in(layer):
        key, value = layer.self_attn.key_value(features, read)

        def attend(inputs):
            keys = jnp.concatenate([key, inputs.key], axis=1)
            values = jnp.concatenate([value, inputs.value], axis=1)
            query = inputs.query.reshape(*inputs.query.shape[:2], keys.shape[2], -1, keys.shape[3])
            scores = jnp.einsum("btgrd,bsgd->bgrts", query, keys) / np.sqrt(keys.shape[3])
            return jnp.einsum("bgrts,bsgd->btgrd", jax.nn.softmax(scores, -1), values).reshape(inputs.query.shape)

        return attend

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def fill(tokens):
        x = params["embedding"][tokens][None] * TARGET.config.embedding_multiplier
        for layer in module.layers:
            x = layer(x, block, attend_in(layer))
        return jnp.argmax(module.logits(x[0], params["output"]), axis=-1)

    expected, share = np.array([text[-1], *[MASK] * DRAFTS]), DRAFTS // passes
    for done in range(1, DRAFTS + 1, share):
        expected[done : done + share] = fill(expected)[done : done + share]
    several = dataclasses.replace(drafter, passes=passes)
    rows = padded(text), jnp.asarray([len(text)], jnp.int32)
    proposal = propose(several, params, followed("dflash", text), *rows)
    assert proposal.tokens[0].tolist() == expected[1:].tolist()


def test_a_tree_of_width_one_is_the_chain():
    drafter, params, _, _ = drafting("eagle3")
    text = PROMPTS[0]
    state = followed("eagle3", text)
    tree = EagleTreeDrafter(drafter.head, DRAFTS, depth=DRAFTS, width=1)
    proposal = propose(tree, params, state, padded(text), jnp.asarray([len(text)], jnp.int32))
    assert proposal.tokens.tolist() == proposed("eagle3", state, text).tokens.tolist()
    assert proposal.parents.tolist() == [list(range(-1, DRAFTS))]


def test_every_path_of_a_tree_is_what_a_chain_along_it_says():
    """The children of a node are the likeliest tokens after a chain that is forced along its path."""
    drafter, _, module, target = drafting("eagle3", tree=True)
    text = PROMPTS[0]
    proposal = proposed("eagle3", followed("eagle3", text, tree=True), text, tree=True)
    tokens, parents = np.asarray(proposal.tokens[0]), np.asarray(proposal.parents[0])
    assert int(proposal.counts[0]) == drafter.max_drafts
    features = np.asarray(module.features(target_hidden(target, text))[0])[: len(text) - 1]
    for node in range(drafter.max_drafts + 1):
        children = tokens[np.flatnonzero(parents == node) - 1]
        path, at = [], node
        while at > 0:
            path.insert(0, int(tokens[at - 1]))
            at = parents[at]
        read, hidden = text[1:], features
        said, logits = runner("eagle3", 0)(read, hidden)
        for token in path:
            read, hidden = [*read, token], np.concatenate([hidden, said[-1:]])
            said, logits = runner("eagle3", 0)(read, hidden)
        assert children.tolist() == np.argsort(-logits, kind="stable")[: len(children)].tolist()


@pytest.mark.parametrize(("kind", "tree"), EVERY)
def test_its_state_follows_the_accepted_text_exactly(kind, tree):
    """Whatever was proposed in between, and however much of a window was accepted; what was not is poisoned."""
    drafter, params, _, target = drafting(kind, tree)
    text = np.random.default_rng(1).integers(0, TARGET.vocab_size, LENGTH).tolist()
    state, at, T = followed(kind, text[:5], tree), 4, drafter.max_drafts + 1
    hidden = target_hidden(target, text)
    for count in (1, 4, 0, 3, 5, 2):
        state = proposed(kind, state, text[: at + 1], tree).state
        columns, real = at + np.arange(T), np.arange(T) < count
        window = np.where(real, columns, 0)
        tokens = np.asarray(text, np.int32)
        progress = Progress(
            tokens=jnp.asarray(np.where(real, tokens[window], -1))[None],
            following=jnp.asarray(np.where(real, tokens[window + 1], -1))[None],
            hidden=tuple(jnp.where(real[:, None], layer[0, window], jnp.nan)[None] for layer in hidden),
            counts=jnp.asarray([count], jnp.int32),
            mode=ms.ForwardMode.TARGET_VERIFY,
        )
        state = update(drafter, params, state, progress)
        at += count
        cache, fresh = (x if kind == "dflash" else x.cache for x in (state, followed(kind, text[: at + 1], tree)))
        assert cache.lengths[0] == fresh.lengths[0] == at
        for mine, theirs in zip(jax.tree.leaves(cache.kv), jax.tree.leaves(fresh.kv), strict=True):
            np.testing.assert_allclose(mine[0, :at], theirs[0, :at], **TOLERANCE)
    if kind != "dflash":
        np.testing.assert_allclose(state.hidden, followed(kind, text[: at + 1], tree).hidden, **TOLERANCE)


def test_what_does_not_fit_is_refused():
    drafter, params, _, _ = drafting("eagle3")
    with pytest.raises(ValueError, match=r"hidden states of layers \(0, 2\), but the target returns those of \(\)"):
        ms.generate(TARGET, PARAMS, PROMPTS, drafter=drafter, drafter_params=params, max_new=2)
    with pytest.raises(ValueError, match=r"a draft head got .* as weights: pass what load_drafter, or bind, returned"):
        ms.generate(TARGET.with_hidden_layers((0, 2)), PARAMS, PROMPTS, drafter=drafter, max_new=2)
    with pytest.raises(ValueError, match=r"EagleDrafter\.max_drafts is 0, expected at least 1"):
        EagleDrafter(drafter.head, 0)
    with pytest.raises(ValueError, match="got a head of 3 layers, expected one that is run on"):
        EagleTreeDrafter(drafting("three layers")[0].head, 4)
    with pytest.raises(ValueError, match=r"max_drafts is 13, expected 1\.\.12: there are no more candidates"):
        EagleTreeDrafter(drafter.head, 13, depth=2, width=3)
    with pytest.raises(ValueError, match=r"mask_token is 29, expected 0\.\.28"):
        DFlashDrafter(drafting("dflash")[0].head, 4, 29)
    with pytest.raises(ValueError, match=r"DFlashDrafter\.passes is 0, expected at least 1"):
        DFlashDrafter(drafting("dflash")[0].head, 4, MASK, 0)
