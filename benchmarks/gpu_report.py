"""The report of `gpu_check.py`: results as they come, what they amount to, and where AUTO looks for them."""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.timing import machine

Results = Iterator[dict[str, Any]]
Section = Callable[[], Results]


class Report:
    """Results as they come: each is printed, and written at once with all before it."""

    def __init__(self, path: Path, budget: float, on_gpu: bool, quick: bool):
        self._path = path
        self._start = time.perf_counter()
        self._budget = budget
        self._content: dict[str, Any] = {"benchmark": "gpu_check", **machine(), "gpu": on_gpu, "quick": quick}
        if not on_gpu:
            self._content["note"] = "NO GPU: kernels were interpreted on the CPU, and no number here is about a GPU"
        self._content |= {"complete": False, "passed": True, "crossovers": {}, "sections": {}}
        self._write()

    @property
    def passed(self) -> bool:
        return self._content["passed"]

    def run(self, name: str, section: Section, until: float = 1.0) -> None:
        """A section's results until that share of the budget is spent; an exception is one more result, and a failure.

        A result with `crossover` is what the section found for one T, and is noted at the top as well.
        """
        results = self._content["sections"].setdefault(name, [])
        try:
            coming = section()
            while time.perf_counter() - self._start < until * self._budget:
                result = next(coming, None)
                if result is None:
                    return
                if "crossover" in result:
                    self._content["crossovers"][str(result["T"])] = result["crossover"]
                self._add(name, results, result)
            self._add(name, results, {"left_out": "what is missing here: the time budget was spent"})
        except Exception as error:
            traceback.print_exc()
            self._add(name, results, failure(error))

    def finish(self) -> None:
        self._content["complete"] = True
        self._write()

    def install(self, path: Path) -> None:
        """Writes the report to where `CommitStrategy.AUTO` reads it.

        Raises:
            ValueError: it is not about a GPU, a check failed, or no T was measured to the end.
        """
        content = self._content
        reasons = {
            "no GPU was seen": not content["gpu"],
            "--quick measures nothing": content["quick"],
            "a check failed": not content["passed"],
            "no T was measured to the end, expected one at least; try a larger --budget": not content["crossovers"],
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found:
            raise ValueError(f"the report is not installed at {path}: {'; '.join(found)}")
        self._write(path)

    def _add(self, name: str, results: list[dict[str, Any]], result: dict[str, Any]) -> None:
        self._content["passed"] &= result.get("ok", True)
        self._content["seconds"] = round(time.perf_counter() - self._start, 1)
        results.append(result)
        print(f"{self._content['seconds']:6.1f} s  {name}: {json.dumps(result, default=str)}", flush=True)
        self._write()

    def _write(self, path: Path | None = None) -> None:
        path = self._path if path is None else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._content, indent=2, default=str) + "\n", encoding="utf-8")


def failure(error: BaseException) -> dict[str, Any]:
    """An exception as a result that fails the report."""
    return {"ok": False, "error": f"{type(error).__name__}: {str(error)[:2000]}"}


def attempt(case: dict[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`case` with what `find` returns; with what it raises, if it raises, so that other cases still get their turn."""
    try:
        return case | find()
    except Exception as error:
        traceback.print_exc()
        return case | failure(error)
