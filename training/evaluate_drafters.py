"""Mean acceptance length of every drafter on the bundled model: `python -m training.evaluate_drafters --json FILE`.

Sixteen prompts, eight to be continued and eight to be edited, greedy and at temperature 0.7, and for each drafter
whether its output is, token for token, that of plain decoding.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mamba_spec_jax as ms
from mamba_spec_jax.assets import DFLASH, DRAFT_MODEL, EAGLE3, MTP, TINY
from mamba_spec_jax.cli.prompts import NUM_PROMPTS, PromptKind, demo_prompts

DRAFTS = 4
TEMPERATURES = {"greedy": 0.0, "temperature 0.7": 0.7}


def drafters(loaded: ms.LoadedModel, drafts: int) -> dict[str, tuple[ms.Drafter, Any]]:
    """Every drafter there is, with its weights."""
    heads = {
        name: ms.load_drafter(folder, loaded, max_drafts=drafts)
        for name, folder in {"EAGLE-3": EAGLE3, "MTP": MTP, "DFlash": DFLASH, "draft model": DRAFT_MODEL}.items()
    }
    found = {name: (head.drafter, head.params) for name, head in heads.items()}
    eagle, params = found["EAGLE-3"]
    ngram = ms.NgramDrafter(drafts)
    return {
        "n-gram": (ngram, None),
        "n-gram tree": (ms.NgramTreeDrafter(3 * drafts), None),
        **found,
        "EAGLE-3 tree": (ms.EagleTreeDrafter(eagle.head, 3 * drafts, depth=drafts, width=3), params),
        "n-gram, else EAGLE-3": (ms.FallbackDrafter(ngram, eagle), (None, params)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="write the table there too")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--strategy", choices=("snapshot", "replay"), default="snapshot", help="of the target")
    options = parser.parse_args()
    loaded = ms.load(TINY, strategy=ms.CommitStrategy(options.strategy))
    tokenizer: Any = loaded.tokenizer
    kinds = (PromptKind.FREE, PromptKind.EDIT)
    prompts = [tokenizer.encode(text).ids for kind in kinds for text in demo_prompts(kind, NUM_PROMPTS)]

    def generate(temperature, **drafting):
        drafter = drafting.get("drafter")
        layers = () if drafter is None else drafter.hidden_layers
        target = loaded.model.with_hidden_layers(layers)
        return ms.generate(
            target, loaded.params, prompts, temperature=temperature, max_new=options.new_tokens, **drafting,
        )  # fmt: skip

    table: dict[str, dict[str, Any]] = {}
    for method_name, temperature in TEMPERATURES.items():
        plain = generate(temperature, num_drafts=0)
        for name, (drafter, params) in drafters(loaded, DRAFTS).items():
            generation = generate(temperature, drafter=drafter, drafter_params=params)
            statistics = generation.statistics
            emitted = np.asarray(statistics.histogram) @ np.arange(1, statistics.histogram.shape[1] + 1)
            rows = np.split(np.arange(len(prompts)), len(kinds))
            lengths = {
                kind.value: round(float(emitted[row].sum() / statistics.passes[row].sum()), 3)
                for kind, row in zip(kinds, rows, strict=True)
            }
            same = sum(mine == theirs for mine, theirs in zip(generation.tokens, plain.tokens, strict=True))
            table.setdefault(method_name, {})[name] = {**lengths, "identical_rows": same, "rows": len(prompts)}
            print(f"{method_name:16} {name:22} {lengths} {same}/{len(prompts)} rows identical", flush=True)
            jax.clear_caches()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(
                {"drafts": DRAFTS, "new_tokens": options.new_tokens, "strategy": options.strategy, "table": table},
                indent=2,
            )
        )


if __name__ == "__main__":
    main()
