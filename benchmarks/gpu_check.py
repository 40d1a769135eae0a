"""What a GPU has to show, in under eight minutes: correct first, then fast. Writes its report as it goes.

1. Every implementation of both ops against its definition, on small random arguments.
2. Every implementation against plain JAX at the shapes of published models, with as many layers as fit.
3. The model: speculative decoding is plain decoding, token for token, and bit for bit through one compiled step.
4. Bytes a second of both ops at those shapes, against a copy on the same device.
5. Speculative against plain decoding: tokens a second, and the cost ratio of a step.

Run as `python -m benchmarks.gpu_check --json FILE`, from the repository, with a jax that sees the GPU. Parts 1, 2 and 4
need jax alone, the others flax and jaxtyping too; without the packages that read checkpoints, or without the bundled
one, the model has random weights. `--quick` shrinks everything and runs anywhere, which proves the script and nothing
about a GPU. Exits with 1 if a check failed.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_ops
from benchmarks.timing import machine

Section = Callable[[], Iterator[dict[str, Any]]]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every result")
    arguments.add_argument("--budget", type=float, default=420, help="seconds after which the rest is left out")
    arguments.add_argument("--quick", action="store_true", help="tiny sizes: runs on a CPU too")
    options = arguments.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.quick:
        arguments.error(f"jax runs on {jax.default_backend()!r} here, expected a GPU; --quick tries the script without")

    sizes = gpu_ops.QUICK if options.quick else gpu_ops.FULL
    report = Report(options.json, options.budget, on_gpu, options.quick)
    report.run("ops against their definition", lambda: gpu_ops.small(sizes))
    report.run("ops at published shapes", lambda: gpu_ops.published(sizes))
    report.run("lossless", lambda: _model().lossless(options.quick))
    report.run("bandwidth", lambda: gpu_ops.bandwidth(sizes))
    report.run("speed", lambda: _model().speed(options.quick))
    report.finish()
    return 0 if report.passed else 1


def _model() -> Any:
    """Imported where it is needed: what it imports may be missing, and the ops do without."""
    from benchmarks import gpu_model

    return gpu_model


class Report:
    """Results as they come: each is printed, and written at once with all before it."""

    def __init__(self, path: Path, budget: float, on_gpu: bool, quick: bool):
        self._path = path
        self._start = time.perf_counter()
        self._budget = budget
        self._content: dict[str, Any] = {"benchmark": "gpu_check", **machine(), "gpu": on_gpu, "quick": quick}
        if not on_gpu:
            self._content["note"] = "NO GPU: kernels were interpreted on the CPU, and no number here is about a GPU"
        self._content |= {"complete": False, "passed": True, "sections": {}}
        self._write()

    @property
    def passed(self) -> bool:
        return self._content["passed"]

    def run(self, name: str, section: Section) -> None:
        """A section's results until the budget is spent; an exception is one more result, and a failure."""
        results = self._content["sections"].setdefault(name, [])
        try:
            coming = section()
            while time.perf_counter() - self._start < self._budget:
                result = next(coming, None)
                if result is None:
                    return
                self._add(name, results, result)
            self._add(name, results, {"left_out": "what is missing here: the time budget was spent"})
        except Exception as error:
            traceback.print_exc()
            self._add(name, results, {"ok": False, "error": f"{type(error).__name__}: {error}"})

    def finish(self) -> None:
        self._content["complete"] = True
        self._write()

    def _add(self, name: str, results: list[dict[str, Any]], result: dict[str, Any]) -> None:
        self._content["passed"] &= result.get("ok", True)
        self._content["seconds"] = round(time.perf_counter() - self._start, 1)
        results.append(result)
        print(f"{self._content['seconds']:6.1f} s  {name}: {json.dumps(result, default=str)}", flush=True)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._content, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
