"""The plot of the byte model; needs matplotlib."""

from pathlib import Path
from typing import Any

from benchmarks import byte_model
from benchmarks.published import MODELS

_WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def draw() -> Any:
    """A figure: bytes of a step over S against T, and replay's share of snapshots' model by model."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    model = MODELS[0]
    for itemsize, style in ((4, "-"), (2, "--")):
        S, name = model.recurrence.state_size * itemsize, {4: "fp32", 2: "bf16"}[itemsize]
        steps = [
            [byte_model.recurrence(model, strategy, tokens, itemsize) for tokens in _WIDTHS]
            for strategy in ("snapshot", "replay")
        ]
        for label, color, values in (
            ("snapshot", "C3", [step.moved / S for step in steps[0]]),
            ("replay", "C0", [step.moved / S for step in steps[1]]),
            ("floor", "0.5", [step.floor / S for step in steps[1]]),
        ):
            left.plot(_WIDTHS, values, style, color=color, label=f"{label}, {name} state")
    left.set(xlabel="T, tokens of a verify step", ylabel="bytes moved / bytes of the state", title=model.name,
             yscale="log", yticks=(1, 2, 4, 8, 16), yticklabels=("1", "2", "4", "8", "16"))  # fmt: skip
    left.minorticks_off()
    left.legend(fontsize="small")
    for place, tokens in enumerate((4, 16)):
        moved = [[byte_model.recurrence(m, which, tokens, 4).moved for which in ("snapshot", "replay")] for m in MODELS]
        at = [i + 0.4 * (place - 0.5) for i in range(len(MODELS))]
        right.barh(at, [replay / snapshot for snapshot, replay in moved], height=0.36, label=f"T = {tokens}")
    right.set(xlabel="bytes of replay / bytes of snapshots, fp32 state", xlim=(0, 0.25),
              yticks=range(len(MODELS)), yticklabels=[m.name for m in MODELS])  # fmt: skip
    right.invert_yaxis()
    right.legend(fontsize="small", loc="lower right")
    return figure


def save(path: Path) -> None:
    """The figure as SVG, the same bytes every time."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bytes"}):
        mpl.use("Agg")
        draw().savefig(path, metadata={"Date": None})
