"""Sampling from the training forward, and what prompt lookup would have saved on the text that came out.

A deterministic draft token is accepted with the probability the model gives it, which is the probability that the
model samples it: on text already sampled from the model, a draft is accepted exactly as far as it agrees with the
text. So acceptance lengths are counted on finished samples, with no speculative loop.
"""

import jax
import jax.numpy as jnp
import numpy as np

from training.model import Params, TinyConfig, forward

LONGEST_MATCH = 3


def sample(params: Params, config: TinyConfig, prompts: list[np.ndarray], count: int, temperature: float, seed: int):
    """`count` tokens after each prompt, `[B, count]`; one pass over the whole padded sequence a token."""
    longest = max(len(prompt) for prompt in prompts) + count
    padded = -(-longest // config.mamba_chunk_size) * config.mamba_chunk_size
    tokens = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    starts = jnp.array([len(prompt) for prompt in prompts])
    rows = jnp.arange(len(prompts))

    @jax.jit
    def step(params, tokens, i):
        # Right padding is not seen by a causal model, so every row may stand at its own length.
        logits = forward(params, tokens, config)[rows, starts + i - 1]
        key = jax.random.fold_in(jax.random.key(seed), i)
        return tokens.at[rows, starts + i].set(jax.random.categorical(key, logits / temperature, axis=-1))

    for i in range(count):
        tokens = step(params, tokens, i)
    tokens = np.asarray(tokens)
    return np.stack([row[len(prompt) : len(prompt) + count] for row, prompt in zip(tokens, prompts, strict=True)])


def prompt_lookup(context: list[int], drafts: int) -> list[int]:
    """The tokens that followed the latest earlier occurrence of the longest matching suffix, 3 tokens down to 1."""
    for length in range(min(LONGEST_MATCH, len(context) - 1), 0, -1):
        suffix = context[-length:]
        for end in range(len(context) - 1, length - 1, -1):
            if context[end - length : end] == suffix:
                return context[end : end + drafts]
    return []


def mean_acceptance_length(prompts: list[np.ndarray], samples: np.ndarray, drafts: int) -> float:
    """Tokens emitted per target pass, the bonus token included, had prompt lookup drafted `drafts` tokens."""
    passes = 0
    for prompt, text in zip(prompts, samples.tolist(), strict=True):
        done = 0
        while done < len(text):
            draft = prompt_lookup([*prompt.tolist(), *text[:done]], drafts)
            accepted = 0
            while accepted < len(draft) and done + accepted < len(text) and draft[accepted] == text[done + accepted]:
                accepted += 1
            done += accepted + 1
            passes += 1
    return samples.size / passes


def distinct_share(samples: np.ndarray, n: int = 4) -> float:
    """The share of n-grams that are distinct within each sample, averaged: 1 never repeats, 0 only loops."""
    shares = [len({tuple(row[i : i + n]) for i in range(len(row) - n + 1)}) / (len(row) - n + 1) for row in samples]
    return float(np.mean(shares))
