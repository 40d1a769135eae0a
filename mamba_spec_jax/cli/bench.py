"""`mamba-spec bench`: the demo's numbers for any model and any number of drafts, as JSON."""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import jax
import jaxlib
import typer
from rich.console import Console

from mamba_spec_jax.cli.measure import Bench, Comparison, Scenario, Timing
from mamba_spec_jax.cli.options import (
    BATCHES,
    BUNDLED,
    BatchesOption,
    DtypeOption,
    MaxNewOption,
    Mode,
    ModelOption,
    ModeOption,
    Precision,
    RepeatsOption,
    SeedOption,
    Strategy,
    StrategyOption,
    parse_drafts,
    title_of,
)
from mamba_spec_jax.cli.prompts import PromptKind
from mamba_spec_jax.cli.runtime import describe, open_model
from pallas_kernels.dispatch import target

_DRAFTS: list[Any] = ["4", "8", "auto"]
_TEMPERATURES = [0.0, 0.7]
_PROMPTS = list(PromptKind)


def bench(
    model: ModelOption = BUNDLED,
    drafts: Annotated[
        list[Any],
        typer.Option(
            "--drafts",
            "-k",
            parser=parse_drafts,
            metavar="N|auto",
            help="Tokens drafted a step, or whatever pays. May be given several times.",
        ),
    ] = _DRAFTS,
    batch: BatchesOption = BATCHES,
    temperature: Annotated[
        list[float], typer.Option("--temperature", "-t", min=0, help="0 is greedy. May be given several times.")
    ] = _TEMPERATURES,
    prompts: Annotated[
        list[PromptKind], typer.Option("--prompts", help="Kind. May be given several times.")
    ] = _PROMPTS,
    max_new_tokens: MaxNewOption = 128,
    repeats: RepeatsOption = 5,
    dtype: DtypeOption = Precision.AUTO,
    mode: ModeOption = Mode.DECODE,
    strategy: StrategyOption = Strategy.AUTO,
    seed: SeedOption = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file; stdout without it.")] = None,
) -> None:
    """Measure speculative against plain decoding in one run, as ratios; writes JSON."""
    with Console(stderr=True).status("Loading the model") as status:
        loaded, tokenizer = open_model(model, dtype, mode, strategy, max(batch))
        runner = Bench(loaded, tokenizer, max_new=max_new_tokens, repeats=repeats, seed=seed)
        comparisons: list[Comparison] = []
        for size, heat, kind in itertools.product(batch, temperature, prompts):
            scenario = Scenario(kind, size, heat)
            status.update(f"{scenario}: compiling, then measuring")
            comparisons += runner.compare(scenario, drafts)
    report = {
        "model": title_of(model),
        "device": describe(target()),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "dtype": str(loaded.model.policy.activations),
        "mode": mode.value,
        "strategy": loaded.model.strategy.value,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "seed": seed,
        "results": [_as_json(comparison) for comparison in comparisons],
    }
    text = json.dumps(report, indent=2)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")


def _as_json(comparison: Comparison) -> dict[str, Any]:
    scenario = comparison.scenario
    return {
        "prompts": scenario.kind.value,
        "batch": scenario.batch,
        "temperature": scenario.temperature,
        "drafts": comparison.drafts,
        "speedup": comparison.speedup,
        "cost_ratio": comparison.cost_ratio,
        "mean_acceptance_length": comparison.speculative.mean_acceptance_length,
        "acceptance_histogram": comparison.speculative.histogram,
        "identical": comparison.identical,
        "first_differences": comparison.first_differences,
        "plain": _timing(comparison.plain),
        "speculative": _timing(comparison.speculative),
    }


def _timing(timing: Timing) -> dict[str, Any]:
    return {"seconds": timing.seconds, "steps": timing.steps, "tokens_per_second": timing.tokens_per_second}
