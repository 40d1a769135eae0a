"""The picture of `demo --plot`: how many tokens passes emitted, and what that did to the speed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_spec_jax.cli.measure import Comparison
from mamba_spec_jax.cli.prompts import PromptKind
from mamba_spec_jax.cli.tables import decoding

_INK, _GRID = "#222222", "#e2e2e2"
_COLOURS = {PromptKind.FREE: "#4c78a8", PromptKind.EDIT: "#e39a3b", PromptKind.REPEAT: "#4f9a6b"}


def require_drawable(path: Path) -> None:
    """Raises before anything is measured if the picture could not be written: ImportError or ValueError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        endings = ", ".join(formats)
        raise ValueError(f"--plot {path} does not name a picture, expected a file ending in one of {endings}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path} cannot be written: {path.parent} is not a folder")


def save_plot(comparisons: Sequence[Comparison], path: Path, subtitle: str) -> None:
    """Draws the comparisons into `path`, whose suffix names the format: a column a way of decoding and batch."""
    from matplotlib.figure import Figure  # optional, and slow to import

    columns: dict[tuple[int, float], list[Comparison]] = {}
    for comparison in comparisons:
        columns.setdefault((comparison.scenario.batch, comparison.scenario.temperature), []).append(comparison)
    figure = Figure(figsize=(1.2 + 3 * max(len(columns), 2), 6.4), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharey="row")
    for column, ((batch, _), group) in enumerate(columns.items()):
        axes[0, column].set_title(f"batch {batch}, {decoding(group[0].scenario)}", fontsize=11, color=_INK)
        _draw_histograms(axes[0, column], group)
        _draw_speeds(axes[1, column], group)
    axes[0, 0].set_ylabel("% of passes")
    axes[1, 0].set_ylabel("tokens/s, plain decoding = 1")
    axes[0, 0].legend(title="prompt", frameon=False, loc="upper center")
    figure.suptitle(f"Speculative against plain decoding\n{subtitle}", fontsize=11, color=_INK)
    figure.savefig(path, dpi=150)


def _draw_histograms(axis: Any, group: Sequence[Comparison]) -> None:
    """Grouped bars: how often a pass emitted 1, 2, ... tokens."""
    width = 0.8 / len(group)
    for index, comparison in enumerate(group):
        counts = comparison.speculative.histogram
        places = [tokens + (index - (len(group) - 1) / 2) * width for tokens in range(1, len(counts) + 1)]
        shares = [100 * count / max(sum(counts), 1) for count in counts]
        kind = comparison.scenario.kind
        axis.bar(places, shares, width, color=_COLOURS[kind], label=kind.value)
    axis.set_xlabel("tokens emitted by a pass")
    axis.set_xticks(range(1, len(group[0].speculative.histogram) + 1))
    _clean(axis)


def _draw_speeds(axis: Any, group: Sequence[Comparison]) -> None:
    """A bar for each kind of prompt, with plain decoding as the line at 1; the text inside explains the speed."""
    axis.axhline(1, color=_INK, linewidth=1, linestyle="--", zorder=0)
    for index, comparison in enumerate(group):
        axis.bar(index, comparison.speedup, 0.7, color=_COLOURS[comparison.scenario.kind])
        parts = f"{comparison.speculative.mean_acceptance_length:.1f} tokens\n/ {comparison.cost_ratio:.1f} cost"
        _write(axis, (index, 0), parts, color="white", fontsize=8)
        plate = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        _write(axis, (index, comparison.speedup), f"{comparison.speedup:.2f}x", color=_INK, fontsize=9, bbox=plate)
    axis.set_xticks(range(len(group)), [comparison.scenario.kind.value for comparison in group])
    axis.margins(y=0.15)
    _clean(axis)


def _write(axis: Any, place: tuple[float, float], text: str, **style: Any) -> None:
    """Text just above a place."""
    axis.annotate(text, place, xytext=(0, 4), textcoords="offset points", ha="center", va="bottom", **style)


def _clean(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=_GRID, linewidth=0.7)
    axis.set_axisbelow(True)
