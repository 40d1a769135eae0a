"""Speculative against plain decoding: tokens per second over tokens per second, same prompts, in turns.

`auto` is `num_drafts="auto"` from a fresh start in every generation, so that it pays for finding out what drafts are
worth.

Run as `python -m benchmarks.speculative`.
"""

import itertools
import statistics

import mamba_spec_jax as ms
from benchmarks.timing import parser, report, rounded
from mamba_spec_jax.cli.measure import Bench, Comparison, Scenario
from mamba_spec_jax.cli.options import BUNDLED, parse_drafts, title_of
from mamba_spec_jax.cli.prompts import PromptKind


def main() -> None:
    arguments = parser(__doc__, rounds=7)
    arguments.add_argument("--model", default=BUNDLED, help="folder or hub id (default: the bundled model)")
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7], help="0 is greedy")
    arguments.add_argument("--drafts", type=parse_drafts, nargs="+", default=[4, 8, "auto"], help="numbers, or auto")
    arguments.add_argument("--prompts", type=PromptKind, nargs="+", default=list(PromptKind))
    arguments.add_argument("--max-new-tokens", type=int, default=256)
    options = arguments.parse_args()
    loaded = ms.load(options.model)
    bench = Bench(loaded, loaded.tokenizer, max_new=options.max_new_tokens, repeats=1)

    results = []
    for batch, temperature, kind in itertools.product(options.batch, options.temperature, options.prompts):
        scenario = Scenario(kind, batch, temperature)
        rounds = [bench.compare(scenario, options.drafts) for _ in range(options.rounds + 1)][1:]
        results += [_summary(list(runs)) for runs in zip(*rounds, strict=True)]
    chosen = {
        "model": title_of(options.model),
        "max_new_tokens": options.max_new_tokens,
        "rounds": options.rounds,
    }
    report(options.json, "speculative", chosen, results)


def _summary(runs: list[Comparison]) -> dict[str, object]:
    """The median of each measured number; what was generated is the same in every round."""
    first = runs[0]
    cost_ratio = statistics.median(run.cost_ratio for run in runs)
    return {
        "prompts": first.scenario.kind.value,
        "batch": first.scenario.batch,
        "temperature": first.scenario.temperature,
        "drafts": first.drafts,
        "speedup": rounded(statistics.median(run.speedup for run in runs)),
        "cost_ratio": None if first.drafts == "auto" else rounded(cost_ratio),
        "mean_acceptance_length": rounded(first.speculative.mean_acceptance_length),
        "plain_tokens_per_second": rounded(statistics.median(run.plain.tokens_per_second for run in runs)),
        "identical": all(run.identical for run in runs),
    }


if __name__ == "__main__":
    main()
