"""The picture of `demo --plot`: how many tokens passes emitted, and what that did to the speed."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_spec_jax.cli.measure import Comparison
from mamba_spec_jax.cli.tables import decoding

_INK, _GRID, _PLAIN = "#222222", "#dddddd", "#b8bcc4"
_COLOURS = {"free": "#4c78a8", "edit": "#e39a3b", "repeat": "#4f9a6b"}


def require_drawable(path: Path) -> None:
    """Raises before anything is measured if the picture could not be written: ImportError or ValueError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib, which is not installed: pip install 'mamba-spec-jax[notebooks]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        endings = ", ".join(formats)
        raise ValueError(f"--plot {path} does not name a picture, expected a file ending in one of {endings}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path} cannot be written: {path.parent} is not a folder")


def save_plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws the comparisons into `path`, whose suffix names the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # optional, and slow to import
    from matplotlib.figure import Figure

    settings = sorted({(c.scenario.temperature, c.scenario.batch) for c in comparisons})
    figure = Figure(figsize=(3.3 * max(len(settings), 2), 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(settings), squeeze=False, sharey="row")
    for column, (temperature, batch) in enumerate(settings):
        group = [c for c in comparisons if (c.scenario.temperature, c.scenario.batch) == (temperature, batch)]
        axes[0, column].set_title(f"{decoding(group[0].scenario)}, batch {batch}", color=_INK)
        _draw_histograms(axes[0, column], group)
        _draw_speeds(axes[1, column], group)
    axes[0, 0].set_ylabel("share of passes")
    axes[1, 0].set_ylabel("tokens a second, of plain decoding's")
    axes[0, 0].legend(frameon=False, title="prompt")
    figure.suptitle("Speculative against plain decoding", fontsize=14, color=_INK)
    figure.savefig(path, dpi=150)


def _draw_histograms(axis: Any, group: Sequence[Comparison]) -> None:
    """Grouped bars: the share of passes that emitted 1, 2, ... tokens, the mean in the legend."""
    width = 0.8 / len(group)
    for index, comparison in enumerate(group):
        counts = comparison.speculative.histogram
        positions = [tokens + (index - (len(group) - 1) / 2) * width for tokens in range(1, len(counts) + 1)]
        shares = [count / max(sum(counts), 1) for count in counts]
        kind = comparison.scenario.kind.value
        axis.bar(positions, shares, width, color=_COLOURS[kind], label=kind)
    axis.set_xlabel("tokens emitted by a pass")
    axis.set_xticks(range(1, len(group[0].speculative.histogram) + 1))
    _clean(axis)


def _draw_speeds(axis: Any, group: Sequence[Comparison]) -> None:
    """One bar a prompt kind against plain decoding's line at 1, with what the bar is made of written on it."""
    for index, comparison in enumerate(group):
        axis.bar(index, comparison.speedup, 0.6, color=_COLOURS[comparison.scenario.kind.value])
        axis.annotate(
            f"{comparison.speedup:.2f}x\n{comparison.speculative.mean_acceptance_length:.1f} a pass",
            (index, comparison.speedup), ha="center", va="bottom", fontsize=8, color=_INK,
            xytext=(0, 2), textcoords="offset points",
        )  # fmt: skip
    axis.axhline(1, color=_INK, linewidth=1, linestyle="--")
    axis.set_xticks(range(len(group)), [comparison.scenario.kind.value for comparison in group])
    axis.margins(y=0.2)
    _clean(axis)


def _clean(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=_GRID, linewidth=0.6)
    axis.set_axisbelow(True)
