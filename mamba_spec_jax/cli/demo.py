"""`mamba-spec demo`: a real hybrid model with and without speculation, the numbers beside each other."""

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mamba_spec_jax.cli.measure import Bench, Comparison, Scenario
from mamba_spec_jax.cli.options import (
    BATCHES,
    BUNDLED,
    BatchesOption,
    DraftsOption,
    DtypeOption,
    MaxNewOption,
    ModelOption,
    Precision,
    RepeatsOption,
    SeedOption,
    title_of,
)
from mamba_spec_jax.cli.plot import require_drawable, save_plot
from mamba_spec_jax.cli.prompts import PromptKind, demo_prompts
from mamba_spec_jax.cli.runtime import describe, model_line, open_model
from mamba_spec_jax.cli.tables import differences, histogram_table, speed_table, text_table
from mamba_spec_jax.text_generation import LoadedModel
from pallas_kernels.dispatch import target

_TEMPERATURE = 0.7
_NOTES = (
    "tokens a pass: emitted per pass of the model, the bonus token included.",
    "cost ratio: time of a step that verifies over that of a plain step.",
    "same tokens: every row equals plain decoding, token for token.",
)
_BUNDLED_NOTE = "When greedy, so small a model repeats itself, which is easily drafted."


def demo(
    model: ModelOption = BUNDLED,
    drafts: DraftsOption = "4",
    max_new_tokens: MaxNewOption = 128,
    batch: BatchesOption = BATCHES,
    repeats: RepeatsOption = 2,
    dtype: DtypeOption = Precision.AUTO,
    seed: SeedOption = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the numbers, into this picture file.")] = None,
) -> None:
    """Decode the same prompts plainly and speculatively; compare text, acceptance and speed."""
    if plot is not None:
        require_drawable(plot)
    console = Console()
    with Console(stderr=True).status("Loading the model") as status:
        loaded, tokenizer = open_model(model, dtype)
        subtitle = f"{model_line(loaded)}\n{_run_line(loaded, drafts, max_new_tokens)}"
        console.print(Text.assemble((title_of(model), "bold"), f"\n{subtitle}\n"))
        bench = Bench(loaded, tokenizer, max_new=max_new_tokens, repeats=repeats, seed=seed)
        comparisons: list[Comparison] = []
        for size, temperature, kind in itertools.product(batch, (0.0, _TEMPERATURE), PromptKind):
            scenario = Scenario(kind, size, temperature)
            status.update(f"{scenario}: compiling, then measuring")
            comparisons += bench.compare(scenario, [drafts])
    for comparison in comparisons:
        scenario = comparison.scenario
        if scenario.batch == batch[0] and scenario.temperature:
            console.print(text_table(comparison, demo_prompts(scenario.kind, 1)[0], tokenizer))
    console.print(speed_table(comparisons))
    console.print(differences(comparisons))
    notes = (*_NOTES, _BUNDLED_NOTE) if model == BUNDLED else _NOTES
    console.print(Text("\n".join(notes), style="dim"), end="\n\n")
    console.print(histogram_table(comparisons))
    if plot is not None:
        save_plot(comparisons, plot, f"{title_of(model)}: {subtitle}")
        console.print(f"Picture: {plot}", highlight=False)


def _run_line(loaded: LoadedModel, drafts: int | str, max_new: int) -> str:
    policy, device = loaded.model.policy, describe(target())
    return f"{policy.activations} on {device}; {max_new} tokens a row; prompt lookup drafts {drafts} a step"
