"""`mamba-spec check`: whether a model decodes speculatively just as it does plainly, and what that takes in memory."""

import json
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mamba_spec_jax.cache.memory import format_bytes
from mamba_spec_jax.cli.checking import Verdict
from mamba_spec_jax.cli.checking import check as check_drafts
from mamba_spec_jax.cli.options import (
    BUNDLED,
    DtypeOption,
    MaxNewOption,
    Precision,
    SeedOption,
    Strategy,
    title_of,
)
from mamba_spec_jax.cli.prompts import PromptKind, demo_prompts
from mamba_spec_jax.cli.runtime import choose_policy, describe, model_line
from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.models.memory import MemoryPlan, plan_memory
from mamba_spec_jax.modes import CommitStrategy
from mamba_spec_jax.text_generation import LoadedModel
from pallas_kernels.dispatch import target

_ROWS = 4  # of the prompts that are made up
_LONGEST = 12  # tokens of a random one
_NOTES = (
    "tokens, states, log-probabilities: those of plain decoding, to the bit; else the greatest difference.",
    "Plain decoding runs in the same compiled step, with no drafts.",
)
_Verdicts = dict[CommitStrategy, list[Verdict]]
_Memory = dict[CommitStrategy, MemoryPlan]


def check(
    model: Annotated[str, typer.Argument(help="A folder or a hub id.", show_default="the bundled model")] = BUNDLED,
    max_new_tokens: MaxNewOption = 64,
    drafts: Annotated[int, typer.Option("--drafts", "-k", min=1, help="Tokens drafted a step.")] = 4,
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", help="A row's. May be given several times.  [default: code; random without tokenizer]"
        ),
    ] = [],  # noqa: B006, typer wants a list
    strategy: Annotated[
        list[Strategy], typer.Option("--strategy", help="Of those there are. May be given several times.")
    ] = [Strategy.SNAPSHOT, Strategy.REPLAY],  # noqa: B006, typer wants a list
    dtype: DtypeOption = Precision.AUTO,
    seed: SeedOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write the results as JSON.")] = False,
) -> None:
    """Compare a model's speculative decoding with its plain decoding, token by token and state by state.

    Exits with 1 if anything differs.
    """
    with Console(stderr=True).status("Loading the model") as status:
        loaded = load(model, policy=choose_policy(dtype), progress=False)
        config, policy = loaded.model.config, loaded.model.policy
        rows = _prompts(loaded, prompt, seed)
        longest = max(map(len, rows)) + max_new_tokens
        verdicts: _Verdicts = {}
        memory: _Memory = {}
        for kept in map(CommitStrategy, strategy):
            status.update(f"{kept.value}: compiling, then decoding")
            chosen = HybridModel.create(config, policy, strategy=kept)
            verdicts[kept] = list(check_drafts(chosen, loaded.params, rows, max_new_tokens, drafts))
            memory[kept] = plan_memory(config, len(rows), longest, drafts + 1, kept, policy)
    passed = all(verdict.passed for found in verdicts.values() for verdict in found)
    if as_json:
        print(json.dumps(_report(loaded, verdicts, memory) | {"passed": passed}, indent=2))
    else:
        run_line = (
            f"{policy.activations} on {describe(target())}; {len(rows)} rows of up to {longest} tokens, "
            f"{max_new_tokens} of them new; {drafts} drafts a step"
        )
        console = Console()
        console.print(Text.assemble((title_of(model), "bold"), f"\n{model_line(loaded)}\n{run_line}\n"))
        _show(console, verdicts, memory)
        console.print(
            "Nothing differs." if passed else "Speculative decoding differs.", style="green" if passed else "red"
        )
    if not passed:
        raise typer.Exit(1)


def _prompts(loaded: LoadedModel, texts: list[str], seed: int) -> list[list[int]]:
    """Token ids of each row: of the given texts, of pieces of code, or random."""
    if loaded.tokenizer is not None:
        texts = texts or demo_prompts(PromptKind.REPEAT, _ROWS)
        return [loaded.tokenizer.encode(text).ids for text in texts]
    if texts:
        raise ValueError(f"--prompt was given, but {loaded.folder} has no tokenizer.json to read it with: leave it out")
    rng = np.random.default_rng(seed)
    lengths = range(1, _LONGEST + 1, (_LONGEST - 1) // (_ROWS - 1))
    return [rng.integers(loaded.model.vocab_size, size=length).tolist() for length in lengths]


def _show(console: Console, verdicts: _Verdicts, memory: _Memory) -> None:
    console.print(_verdict_table(verdicts))
    for strategy, found in verdicts.items():
        for verdict in found:
            for line in _differences(verdict):
                console.print(f"{strategy.value}, {verdict.drafts}: {line}", style="red", highlight=False)
    console.print(Text("\n".join(_NOTES), style="dim"), end="\n\n")
    console.print(_memory_table(memory))


def _verdict_table(verdicts: _Verdicts) -> Table:
    table = Table(
        title="Speculative against plain decoding", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    table.add_column("strategy")
    table.add_column("drafts")
    for name in ("tokens\na pass", "same\ntokens", "same\nstates", "same log-\nprobs"):
        table.add_column(name, justify="right")
    for strategy, found in verdicts.items():
        for verdict in found:
            rows = len(verdict.first_differences)
            table.add_row(
                strategy.value,
                verdict.drafts,
                f"{verdict.mean_acceptance_length:.2f}",
                _mark(verdict.same_tokens, f"{verdict.first_differences.count(None)}/{rows}"),
                _mark(not verdict.state_differences, f"{max(verdict.state_differences.values(), default=0):.1e}"),
                _mark(verdict.logprob_difference == 0, f"{verdict.logprob_difference:.1e}"),
            )
    return table


def _mark(same: bool, otherwise: str) -> Text:
    return Text("yes", style="green") if same else Text(otherwise, style="red")


def _differences(verdict: Verdict) -> list[str]:
    rows = [
        f"row {row} differs from token {at} on" for row, at in enumerate(verdict.first_differences) if at is not None
    ]
    states = [f"{name} differs by up to {size:.1e}" for name, size in verdict.state_differences.items()]
    if verdict.judged_rightly:
        return rows + states
    passes, expected = verdict.judged_passes  # type: ignore[misc]  # else it would be judged rightly
    return [*rows, *states, f"rows took {', '.join(map(str, passes))} passes, expected {expected} each"]


def _memory_table(memory: _Memory) -> Table:
    table = Table(title="Memory", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for strategy in memory:
        table.add_column(strategy.value, justify="right")
    for part in dict.fromkeys(part for plan in memory.values() for part in plan.parts):
        table.add_row(part, *(format_bytes(plan.parts[part]) if part in plan.parts else "" for plan in memory.values()))
    table.add_section()
    table.add_row("total", *(format_bytes(plan.total) for plan in memory.values()), style="bold")
    return table


def _report(loaded: LoadedModel, verdicts: _Verdicts, memory: _Memory) -> dict[str, Any]:
    return {
        "model_type": loaded.model.config.model_type,
        "device": describe(target()),
        "jax": jax.__version__,
        "dtype": str(loaded.model.policy.activations),
        "strategies": {
            strategy.value: {
                "memory": dict(memory[strategy].parts),
                "drafts": {
                    verdict.drafts: {
                        "passed": verdict.passed,
                        "mean_acceptance_length": verdict.mean_acceptance_length,
                        "first_differences": verdict.first_differences,
                        "state_differences": verdict.state_differences,
                        "logprob_difference": verdict.logprob_difference,
                    }
                    for verdict in found
                },
            }
            for strategy, found in verdicts.items()
        },
    }
