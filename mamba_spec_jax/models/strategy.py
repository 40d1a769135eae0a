"""Which commit strategy pays on a device: read from measurements made there, never guessed."""

import dataclasses
import json
import re
from pathlib import Path

from mamba_spec_jax.modes import CommitStrategy
from pallas_kernels.dispatch import Device, target

MEASUREMENTS = Path(__file__).parents[1] / "assets" / "measurements"


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """A strategy, and why it was chosen."""

    strategy: CommitStrategy
    reason: str


def choose_strategy(batch: int, num_tokens: int, device: Device | None = None) -> StrategyChoice:
    """What `CommitStrategy.AUTO` means for `batch` rows and windows of `num_tokens` on a device.

    SNAPSHOT, unless `benchmarks/gpu_check.py` has found on such a device that REPLAY is no slower from some batch on:
    its report has, for every T it measured, the least such batch. A window in between counts as the next shorter one.

    Args:
        batch: B.
        num_tokens: T, root and drafts.
        device: jax's default device if None.
    """
    for name, value in (("batch", batch), ("num_tokens", num_tokens)):
        if value < 1:
            raise ValueError(f"choose_strategy got {name}={value}, expected at least 1")
    device = target() if device is None else device
    path = measurements_of(device)
    if not path.exists():
        return StrategyChoice(CommitStrategy.SNAPSHOT, f"nobody has measured REPLAY on {device.kind} yet")
    least_batch = {int(T): least for T, least in json.loads(path.read_text(encoding="utf-8"))["crossovers"].items()}
    measured = [T for T in sorted(least_batch) if num_tokens >= T]
    if not measured:
        known = ", ".join(map(str, sorted(least_batch))) or "none"
        return StrategyChoice(CommitStrategy.SNAPSHOT, f"{path.stem} was measured at T = {known}, not at {num_tokens}")
    least = least_batch[measured[-1]]
    if least is None:
        return StrategyChoice(CommitStrategy.SNAPSHOT, f"REPLAY never paid on {device.kind} at T = {measured[-1]}")
    pays = batch >= least
    return StrategyChoice(
        CommitStrategy.REPLAY if pays else CommitStrategy.SNAPSHOT,
        f"on {device.kind} REPLAY pays from batch {least} on at T = {measured[-1]}",
    )


def measurements_of(device: Device) -> Path:
    """Where the report of a kind of device is kept."""
    return MEASUREMENTS / (re.sub(r"[^a-z0-9]+", "_", device.kind.lower()).strip("_") + ".json")
