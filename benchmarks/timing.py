"""What the benchmarks share: cases timed in turns, ratios within a round, and reports as JSON."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.dispatch import target

Prepare = Callable[[], Callable[[], Any]]


class Samples:
    """Seconds of every case in every round."""

    def __init__(self, seconds: Mapping[Hashable, list[float]]):
        self.seconds = dict(seconds)

    def median(self, case: Hashable) -> float:
        return statistics.median(self.seconds[case])

    def ratio(self, case: Hashable, baseline: Hashable) -> float:
        """The median over rounds of one case's time over another's: what slows a whole round down cancels out."""
        pairs = zip(self.seconds[case], self.seconds[baseline], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def measure(cases: Mapping[Any, Prepare], rounds: int) -> Samples:
    """Times every case once a round, in turns.

    Args:
        cases: each prepares its run, untimed, and returns it; a run ends when its result is ready. What a run compiles,
            it compiles in a round before the first that counts.
        rounds: how many count.
    """
    seconds: dict[Hashable, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, prepare in cases.items():
            run = prepare()
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:
                seconds[name].append(time.perf_counter() - start)
    return Samples(seconds)


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the report there instead of printing it")
    arguments.add_argument("--rounds", type=int, default=rounds, help="timed repetitions (default: %(default)s)")
    return arguments


def report(path: Path | None, benchmark: str, options: Mapping[str, Any], results: Any) -> None:
    """Writes a report, or prints it."""
    text = json.dumps(
        {"benchmark": benchmark, **machine(), "options": dict(options), "results": results}, indent=2, default=str
    )
    if path is None:
        print(text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Where a report was made; load is how many processes wanted a core, on average over a minute."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"device": str(target()), "cores": os.cpu_count(), "load": load, "jax": jax.__version__}


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
