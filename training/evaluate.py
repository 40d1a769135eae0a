"""Measures a model folder: `python -m training.evaluate mamba_spec_jax/assets/tiny`.

Prints and writes evaluation.json there: held-out bits a byte, losses on repeated spans (first and second copy), the
share of distinct 4-grams in samples, and the acceptance prompt lookup would have had. The weights are the stored bf16
ones. `--write-logits FILE` instead writes logits for training/check_export.py.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from training.corpus import Corpus, encode, load_corpus
from training.data import RENAME_MARK, REPEAT_MARK, held_out_stream, identifiers, rename
from training.export import read_folder
from training.model import forward, token_losses
from training.sampling import distinct_share, mean_acceptance_length, sample

WINDOW, STRIDE = 512, 256
SPAN = 192
PROMPTS, PROMPT_TOKENS, SAMPLE_TOKENS = 16, 160, 128
TEMPERATURE = 0.7
NEW_NAME = "replacement"


def bits_per_byte(losses_fn, stream: np.ndarray, size: int) -> float:
    """Windows of 512 tokens, each scored on its second half (the first window on all of it)."""
    nats, scored = 0.0, 0
    for start in tqdm(range(0, len(stream) - WINDOW - 1, STRIDE), desc="held-out text", mininterval=5.0):
        losses = losses_fn(stream[None, start : start + WINDOW + 1])[0]
        part = losses if start == 0 else losses[WINDOW - STRIDE :]
        nats, scored = nats + float(part.sum()), scored + len(part)
    return nats / np.log(2) / (scored / len(stream) * size)


def repeated_span_losses(losses_fn, spans: np.ndarray) -> dict[str, float]:
    """Mean nats a token over the first and the second copy of spans `[B, SPAN]`; a copy's first token is left out."""
    rows = np.concatenate([spans, spans], axis=1)
    rows = np.concatenate([rows, np.zeros((len(rows), -(rows.shape[1] - 1) % 64), np.int32)], axis=1)
    losses = np.concatenate([losses_fn(row[None]) for row in rows])
    return {
        "first_copy": float(losses[:, : SPAN - 1].mean()),
        "second_copy": float(losses[:, SPAN : 2 * SPAN - 1].mean()),
    }


def names_used(text: str) -> list[str]:
    """The words of `text` that serve as names somewhere in it (called, assigned, subscripted), commonest first."""
    used = set(re.findall(r"\b(\w+)(?=\s?[=.(\[])", text))
    return [name for name, _ in Counter(identifiers(text)).most_common() if name in used]


def held_out_excerpts(corpus: Corpus, count: int, characters: int, seed: int) -> list[str]:
    """Whole lines of held-out files with a name in them, `characters` long or a little less."""
    rng = np.random.default_rng(seed)
    texts = [text for text in corpus.held_out.values() if len(text) > 4 * characters]
    excerpts: list[str] = []
    while len(excerpts) < count:
        text = texts[rng.integers(len(texts))]
        start = text.index("\n", int(rng.integers(len(text) - 2 * characters))) + 1
        excerpt = text[start : text.rindex("\n", start, start + characters)]
        if names_used(excerpt):
            excerpts.append(excerpt)
    return excerpts


def prompts_by_kind(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Three kinds of prompt on held-out code, each with what was asked for: repeat it, repeat it renamed, go on freely.

    A prompt ends before its last line break: the tokenizer joins a line break to the indentation after it, and cut
    there the model would see a token that training never puts in this place.
    """
    excerpts = held_out_excerpts(corpus, PROMPTS, int(2.4 * PROMPT_TOKENS), seed=2)
    texts: dict[str, list[tuple[str, str]]] = {"repeat": [], "rename": [], "free": []}
    for text in excerpts:
        old = names_used(text)[0]
        mark = RENAME_MARK.format(old=old, new=NEW_NAME)
        texts["repeat"].append((text + REPEAT_MARK.rstrip("\n"), "\n" + text))
        texts["rename"].append((text + mark.rstrip("\n"), "\n" + rename(text, old, NEW_NAME)))
        texts["free"].append((text, ""))
    return {
        kind: [(encode(tokenizer, prompt), encode(tokenizer, wanted)) for prompt, wanted in group]
        for kind, group in texts.items()
    }


def agreeing_tokens(text: np.ndarray, wanted: np.ndarray) -> int:
    """How many tokens at the start of `text` are those of `wanted`."""
    length = min(len(text), len(wanted))
    return int(np.cumprod(text[:length] == wanted[:length]).sum())


def evaluate(folder: Path, samples_folder: Path | None) -> dict:
    """All measurements of a model folder; the samples themselves go to `samples_folder` if one is named."""
    config, params, tokenizer = read_folder(folder)
    corpus = load_corpus()
    jitted = jax.jit(lambda params, rows: token_losses(params, rows, config))

    def losses_fn(rows: np.ndarray) -> np.ndarray:
        return np.asarray(jitted(params, rows))

    stream, size = held_out_stream(corpus, tokenizer)
    rng = np.random.default_rng(3)
    starts = rng.integers(len(stream) - SPAN, size=PROMPTS)
    result: dict[str, Any] = {
        "held_out_bits_per_byte": bits_per_byte(losses_fn, stream, size),
        "repeated_random_spans": repeated_span_losses(losses_fn, rng.integers(1, config.vocab_size, (PROMPTS, SPAN))),
        "repeated_code_spans": repeated_span_losses(losses_fn, np.stack([stream[s : s + SPAN] for s in starts])),
        "distinct_4grams": {"held-out text": distinct_share(stream[: PROMPTS * SAMPLE_TOKENS].reshape(PROMPTS, -1))},
        "temperature": TEMPERATURE,
        "mean_acceptance_length": {},
        "exact_tokens_before_first_deviation": {},
    }
    for kind, pairs in tqdm(prompts_by_kind(corpus, tokenizer).items(), desc="samples"):
        prompts, wanted = [prompt for prompt, _ in pairs], [want for _, want in pairs]
        samples = sample(params, config, prompts, SAMPLE_TOKENS, TEMPERATURE, seed=0)
        lengths = {f"K={drafts}": mean_acceptance_length(prompts, samples, drafts) for drafts in (4, 8)}
        result["mean_acceptance_length"][kind] = lengths
        result["distinct_4grams"][kind] = distinct_share(samples)
        if kind != "free":
            agreeing = [agreeing_tokens(text, want) for text, want in zip(samples, wanted, strict=True)]
            asked = sum(min(len(want), SAMPLE_TOKENS) for want in wanted)
            result["exact_tokens_before_first_deviation"][kind] = {
                "mean": sum(agreeing) / PROMPTS,
                "asked": asked / PROMPTS,
            }
        if samples_folder:
            written = [f"{tokenizer.decode(p)}>>>>{tokenizer.decode(t)}" for p, t in zip(prompts, samples, strict=True)]
            samples_folder.mkdir(parents=True, exist_ok=True)
            (samples_folder / f"{kind}.txt").write_text("\n\n====\n".join(written))
    return result


def write_logits(folder: Path, file: Path) -> None:
    config, params, tokenizer = read_folder(folder)
    stream, _ = held_out_stream(load_corpus(), tokenizer)
    tokens = jnp.asarray(stream[1000:1256].reshape(2, 128))
    np.savez(file, tokens=tokens, logits=np.asarray(forward(params, tokens, config)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=Path, default=None, help="also write prompts and samples to this folder")
    parser.add_argument("--write-logits", type=Path, default=None)
    options = parser.parse_args()
    if options.write_logits:
        write_logits(options.folder, options.write_logits)
        return
    text = json.dumps(evaluate(options.folder, options.samples), indent=2)
    print(text)
    (options.folder / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
