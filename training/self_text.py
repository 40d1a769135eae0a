"""Text that the bundled model wrote, greedily and at temperature 0.7: what its drafters will have to follow.

A drafter trained on the corpus alone meets at work what no corpus holds, the model's own habits and loops among them.
"""

from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

import mamba_spec_jax as ms
from mamba_spec_jax.assets import TINY
from training.data import Mix

BATCH = 64
PROMPT_TOKENS = (16, 128)
FIRST_STEP = 10**9  # of the mixture, so far on that training never draws the same rows
TEMPERATURES = (0.0, 0.7)


def self_text(path: Path, mix: Mix, rows: int, tokens: int, seed: int) -> np.ndarray:
    """`rows` rows `[N, T + 1]`: the beginning of a row of the mixture, then what the model makes of it.

    Kept in `path`, where a later run finds them.
    """
    if path.exists():
        return np.load(path)
    loaded = ms.load(TINY)
    rng = np.random.default_rng(seed)
    written = []
    for batch in tqdm(range(-(-rows // BATCH)), desc="self text"):
        temperature = TEMPERATURES[batch % len(TEMPERATURES)]
        drawn, _ = mix.batch(FIRST_STEP + batch, BATCH, tokens)
        prompts = [row[: rng.integers(*PROMPT_TOKENS)].tolist() for row in drawn]
        seeds = [int(s) for s in rng.integers(2**31, size=BATCH)]
        generation = ms.generate(
            loaded.model, loaded.params, prompts, temperature=temperature, num_drafts=0,
            max_new=tokens + 1 - PROMPT_TOKENS[0], seeds=seeds if temperature else 0,
        )  # fmt: skip
        whole = [prompt + list(new) for prompt, new in zip(prompts, generation.tokens, strict=True)]
        written += [row[: tokens + 1] for row in whole if len(row) > tokens]
    text = np.array(written[:rows], np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, text)
    jax.clear_caches()
    return text
