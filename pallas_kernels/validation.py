"""What `validate=True` reports: index values that would be skipped by mistake, or would leave a slot undefined."""

import jax
import numpy as np

from pallas_kernels.arguments import Extent, Indices


def check_values(
    op: str, extent: Extent, indices: Indices, parents: jax.Array | None = None, *, reads_slots: bool
) -> None:
    """Raises a ValueError that names every bad index with its position; for eager calls only.

    reads_slots: an entry reads its live slot even where only its tracked state is written.
    """
    given = {name: value for name, value in indices._asdict().items() if value is not None}
    if parents is not None:
        given["parents"] = parents
    if any(isinstance(value, jax.core.Tracer) for value in given.values()):
        raise ValueError(
            f"{op}: validate=True reads index values, so it cannot run inside jit; call it eagerly or drop it"
        )
    values = {"rows": np.arange(indices.slots.size)} | {name: np.asarray(value) for name, value in given.items()}
    limits = {
        "slots": extent.slots,
        "steps": extent.steps,
        "rows": extent.rows,
        "track_slots": extent.slots,
        "track_steps": extent.steps,
    }
    limits = {name: limit for name, limit in limits.items() if name in values}
    inside = {name: (values[name] >= 0) & (values[name] < limit) for name, limit in limits.items()}
    problems = [
        f"{name}[{i}] = {values[name][i]} is out of range (-1 or 0..{limit - 1})"
        for name, limit in limits.items()
        for i in np.flatnonzero(~inside[name] & (values[name] != -1))
    ]
    if "parents" in values:
        problems += _late_parents(values["parents"])
    problems += _shared_slots(values, inside, reads_slots)
    if problems:
        raise ValueError(f"{op}: " + "; ".join(problems))


def _late_parents(parents: np.ndarray) -> list[str]:
    bad = (parents < -1) | (parents >= np.arange(parents.shape[1]))
    return [f"parents[{i}, {t}] = {parents[i, t]} is not an earlier node or -1" for i, t in np.argwhere(bad)]


def _shared_slots(values: dict[str, np.ndarray], inside: dict[str, np.ndarray], reads_slots: bool) -> list[str]:
    """Slots that one index writes and another names."""
    live = inside["slots"] & inside["steps"] & inside["rows"]
    written = {"slots": live}
    reading = np.zeros_like(live)
    if "track_slots" in values:
        tracked = inside["track_slots"] & inside["track_steps"] & inside["rows"]
        if reads_slots:
            tracked &= inside["slots"]
            reading = tracked & ~live
        written["track_slots"] = tracked

    names: dict[int, list[str]] = {}
    for name, writes in written.items():
        for i in np.flatnonzero(writes):
            names.setdefault(int(values[name][i]), []).append(f"{name}[{i}]")
    for i in np.flatnonzero(reading):
        slot = int(values["slots"][i])
        if slot in names:  # two readers of one slot do not disturb each other
            names[slot].append(f"slots[{i}]")
    return [f"slot {slot} is named more than once: {', '.join(who)}" for slot, who in sorted(names.items()) if who[1:]]
