"""Whole generations of tiny models with a drafter, for the tests of drafters that keep a recurrent state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mamba_spec_jax as ms
from mamba_spec_jax.speculative import decoder as decoding

# Loops are checked here, not the optimiser, whose passes take most of the time of compiling so small a model.
QUICKLY = {"xla_backend_optimization_level": 0}
PROMPTS = [[3, 9, 4, 3, 9, 4, 3], [5, 5], [11]]


_prefill = jax.jit(ms.Decoder.prefill, compiler_options=QUICKLY)


def quick_prefills(monkeypatch):
    monkeypatch.setattr(decoding, "_prefill", _prefill)


@functools.partial(jax.jit, compiler_options=QUICKLY)
def decode(decoder, weights, state, steps):
    return decoder.until_finished(weights, state, steps)


def run(model, params, drafter, drafter_params, method, num_drafts, *, prompts=PROMPTS, eos=None, **requests):
    """The state when every row has finished."""
    stops = ms.StopConditions.create([model.vocab_size if eos is None else eos])
    weights = ms.Weights(params, drafter_params)
    state = ms.Decoder(model, drafter, ms.Sampling()).init(weights, prompts, stops=stops, **requests)
    decoder = ms.Decoder(model, drafter, method, num_drafts)
    state = decode(decoder, weights, state, jnp.int32(np.max(requests["max_new"])))
    assert not np.any(state.active)
    return state


def texts(state):
    return [np.asarray(state.tokens)[row, :length].tolist() for row, length in enumerate(state.lengths)]


@functools.partial(jax.jit, static_argnames="model", compiler_options=QUICKLY)
def read(model, params, tokens, counts):
    cache = model.init_cache(*tokens.shape)
    return model.prefill(params, tokens, cache, slots=jnp.arange(len(tokens)), num_tokens=counts).cache


def assert_has_read_the_text(cache, model, params, state):
    """The cache is what reading each row's text afresh gives, all but its last token, to rounding."""
    counts = state.lengths - 1
    fresh = read(model, params, state.tokens, counts)
    np.testing.assert_array_equal(cache.lengths, counts)
    for name in ("ssm", "conv"):
        np.testing.assert_allclose(
            getattr(cache.mamba, name), getattr(fresh.mamba, name), rtol=1e-5, atol=1e-5, err_msg=name
        )
    for mine, theirs in zip(jax.tree.leaves(cache.kv), jax.tree.leaves(fresh.kv), strict=True):
        for row, count in enumerate(np.asarray(counts)):
            np.testing.assert_allclose(mine[row, :count], theirs[row, :count], rtol=1e-5, atol=1e-5)
