"""What a GPU has to show, in under eight minutes: correct first, then fast. Writes its report as it goes.

1. Every implementation of the ops that move states against its definition, and of the ops that compute against plain
   JAX on this machine's CPU, on small random arguments.
2. Snapshots, replay and decoding token by token: the same bits.
3. Every implementation against plain JAX on the device at the shapes of published models, with as many layers as fit.
4. The model: speculative decoding is plain decoding, token for token, and bit for bit through one compiled step.
5. SNAPSHOT against REPLAY at those shapes, by batch and T, and from which batch on REPLAY pays: the crossovers that
   `CommitStrategy.AUTO` goes by.
6. Bytes a second of attention, convolution and commit, against a copy on the same device.
7. Speculative against plain decoding: tokens a second, and the cost ratio of a step.

Run as `python -m benchmarks.gpu_check --json FILE`, from the repository, with a jax that sees the GPU and, for part 1,
the CPU too (JAX_PLATFORMS unset). Parts 4 and 7 need flax and jaxtyping besides jax; without the packages that read
checkpoints, or without the bundled one, the model has random weights. Each part may use the budget up to some share of
it, so that none keeps the next from starting. `--install` also writes the report to where AUTO reads it, if it is about
a GPU and nothing failed. `--quick` shrinks everything and runs anywhere, which proves the script and nothing about a
GPU. Exits with 1 if a check failed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_kernels, gpu_ops, gpu_passes, gpu_speed, gpu_strategies
from benchmarks.gpu_report import Report, Results


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, required=True, metavar="FILE", help="rewritten after every result")
    arguments.add_argument("--budget", type=float, default=440, help="seconds after which the rest is left out")
    arguments.add_argument("--quick", action="store_true", help="tiny sizes: runs on a CPU too")
    arguments.add_argument("--install", action="store_true", help="also write the report to where AUTO reads it")
    options = arguments.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.quick:
        arguments.error(f"jax runs on {jax.default_backend()!r} here, expected a GPU; --quick tries the script without")
    if options.quick and options.install:
        arguments.error("--install needs measurements, and --quick makes none; drop one of them")

    quick = options.quick
    if not on_gpu:  # optimising what runs once takes longer than it saves
        jax.config.update("jax_disable_most_optimizations", True)
    report = Report(options.json, options.budget, on_gpu, quick)
    run_sections(report, quick)
    report.finish()
    if options.install:
        path = _installed_at()
        report.install(path)
        print(f"installed at {path}")
    return 0 if report.passed else 1


def run_sections(report: Report, quick: bool) -> None:
    """All parts, what matters first."""

    def sizes(module: Any) -> Any:
        return module.QUICK if quick else module.FULL

    def same_bits() -> Results:
        measured = sizes(gpu_strategies)
        layers = tuple((model.name, model.recurrence) for model in measured.models)
        dtypes = ("bfloat16",) if quick else ("float32", "bfloat16")
        return gpu_passes.same_bits(layers, 4 * measured.tokens[0], measured.tokens[0], dtypes, ways)

    def ways(op: str) -> list[dict[str, Any]]:
        found = [how for _, how in gpu_ops.runnable(op, quick) if how is not None]
        return found[-1:] if quick else found

    report.run("ops against their definition", lambda: gpu_ops.small(sizes(gpu_ops)), until=0.07)
    report.run("kernels against plain JAX", lambda: gpu_kernels.small(sizes(gpu_kernels)), until=0.2)
    report.run("the same bits", same_bits, until=0.25)
    report.run("kernels at published shapes", lambda: gpu_kernels.published(sizes(gpu_kernels)), until=0.35)
    report.run("lossless", lambda: _model().lossless(quick), until=0.43)
    report.run("strategies", lambda: gpu_strategies.sweep(sizes(gpu_strategies)), until=0.84)
    report.run("attention and convolution", lambda: gpu_speed.ops(sizes(gpu_speed)), until=0.9)
    report.run("ops at published shapes", lambda: gpu_ops.published(sizes(gpu_ops)), until=0.94)
    report.run("bandwidth", lambda: gpu_ops.bandwidth(sizes(gpu_ops)), until=0.97)
    report.run("speed", lambda: _model().speed(quick))


def _model() -> Any:
    """Imported where it is needed: what it imports may be missing, and the ops do without."""
    from benchmarks import gpu_model

    return gpu_model


def _installed_at() -> Path:
    from mamba_spec_jax.models.strategy import measurements_of
    from pallas_kernels.dispatch import target

    return measurements_of(target())


if __name__ == "__main__":
    sys.exit(main())
