"""What was measured, as rich tables that fit into 80 columns."""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from mamba_spec_jax.cli.measure import Comparison, Scenario
from mamba_spec_jax.cli.prompts import PromptKind
from mamba_spec_jax.speculative.stream import generated_texts

_TASKS = {PromptKind.FREE: "go on", PromptKind.EDIT: "rename", PromptKind.REPEAT: "repeat"}


def speed_table(comparisons: Sequence[Comparison]) -> RenderableType:
    """One line a comparison: acceptance, cost, speed, and whether the tokens are the same."""
    table = _table("Plain against speculative decoding")
    table.add_column("prompt")
    table.add_column("batch", justify="right")
    table.add_column("decoding")
    table.add_column("tokens\na pass", justify="right")
    table.add_column("cost\nratio", justify="right")
    table.add_column("tokens/s\nplain", justify="right")
    table.add_column("tokens/s\nspec.", justify="right")
    table.add_column("speed-\nup", justify="right")
    table.add_column("same\ntokens", justify="center")
    for comparison in comparisons:
        scenario = comparison.scenario
        table.add_row(
            scenario.kind.value,
            str(scenario.batch),
            decoding(scenario),
            f"{comparison.speculative.mean_acceptance_length:.2f}",
            f"{comparison.cost_ratio:.2f}",
            f"{comparison.plain.tokens_per_second:.0f}",
            f"{comparison.speculative.tokens_per_second:.0f}",
            _speedup(comparison.speedup),
            _identity(comparison),
        )
    return table


def histogram_table(comparisons: Sequence[Comparison]) -> RenderableType:
    """How often a pass emitted 1, 2, ... tokens, in per cent of the passes."""
    widest = max(len(comparison.speculative.histogram) for comparison in comparisons)
    table = _table("Tokens emitted by a pass, % of passes")
    table.add_column("prompt")
    table.add_column("batch", justify="right")
    table.add_column("decoding")
    for tokens in range(1, widest + 1):
        table.add_column(str(tokens), justify="right")
    for comparison in comparisons:
        counts = comparison.speculative.histogram
        shares = [count / max(sum(counts), 1) for count in counts]
        table.add_row(
            comparison.scenario.kind.value,
            str(comparison.scenario.batch),
            decoding(comparison.scenario),
            *(f"{100 * share:.0f}" if share else "·" for share in shares),
        )
    return table


def text_table(comparison: Comparison, prompt: str, tokenizer: Tokenizer, lines: int = 8) -> RenderableType:
    """The beginning of what the first row wrote; plain and speculative beside each other if they differ."""
    texts = {"plain": comparison.plain, "speculative": comparison.speculative}
    if comparison.first_differences[0] is None:
        texts = {"plain and speculative, the same tokens": comparison.plain}
    scenario = comparison.scenario
    table = _table(f"A prompt to {_TASKS[scenario.kind]}, {decoding(scenario)}, ending in: {_last_line(prompt)}")
    for name in texts:
        table.add_column(name, ratio=1, no_wrap=True, overflow="ellipsis", header_style="dim")
    written = (generated_texts(timing.generation, tokenizer)[0] for timing in texts.values())
    table.add_row(*(Text("\n".join(text.strip("\n").splitlines()[:lines])) for text in written))
    table.expand = True
    return table


def decoding(scenario: Scenario) -> str:
    """`greedy` or `temp 0.7`."""
    return f"temp {scenario.temperature:g}" if scenario.temperature else "greedy"


def differences(comparisons: Sequence[Comparison]) -> RenderableType:
    """Names every row whose tokens differ from plain decoding; nothing if there is none."""
    lines = [
        Text(f"{comparison.scenario}: row {row} differs from token {at} on", style="red")
        for comparison in comparisons
        for row, at in enumerate(comparison.first_differences)
        if at is not None
    ]
    return Group(*lines)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2].strip()


def _speedup(value: float) -> Text:
    return Text(f"{value:.2f}x", style="green" if value > 1 else "yellow")


def _identity(comparison: Comparison) -> Text:
    if comparison.identical:
        return Text("yes", style="green")
    same = sum(difference is None for difference in comparison.first_differences)
    return Text(f"{same}/{comparison.scenario.batch}", style="red")
