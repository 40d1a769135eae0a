"""Cost of a commit: against the number of slots, against T, and against a copy of as many bytes.

The bytes that a commit moves depend on the batch alone. So should its time: neither more slots nor more snapshots to
choose from may cost anything.

Run as `python -m benchmarks.commit`.
"""

import jax.numpy as jnp

from benchmarks import ops
from benchmarks.timing import Prepare, measure, parser, report, rounded
from pallas_kernels.state_commit.shapes import CommitShape

SHAPE = CommitShape(layers=8, state=(16, 64, 64), channels=1280, conv_width=4, conv_dtype=jnp.float32)
BASE_WIDTH = 5
CALLS = 8  # in one timed run


def main() -> None:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    arguments.add_argument("--widths", type=int, nargs="+", default=[2, 5, 9, 17], metavar="T")
    options = arguments.parse_args()
    slots = sorted(options.slots)
    sizes = [(number, BASE_WIDTH) for number in slots]
    sizes += [(slots[0], width) for width in options.widths if width != BASE_WIDTH]

    results = []
    for op in ops.OPS:
        moved = ops.moved_bytes(op, SHAPE, options.batch)
        cases: dict[object, Prepare] = {size: _op(op, options.batch, *size) for size in sizes}
        cases["copy"] = _copy(moved)
        samples = measure(cases, options.rounds)
        for size in sizes:
            results.append(
                {
                    "op": op,
                    "slots": size[0],
                    "T": size[1],
                    "moved_bytes": moved,
                    "seconds": rounded(samples.median(size) / CALLS),
                    "over_base": rounded(samples.ratio(size, sizes[0])),
                    "over_copy": rounded(samples.ratio(size, "copy")),
                }
            )
    chosen = {"batch": options.batch, "rounds": options.rounds, "layers": SHAPE.layers, "state": SHAPE.state}
    report(options.json, "commit", chosen, results)


def _op(op: str, batch: int, slots: int, width: int) -> Prepare:
    advance = ops.advancing(op, ops.arguments(op, SHAPE, slots, batch, width), CALLS)
    return lambda: advance


def _copy(size: int) -> Prepare:
    copy = ops.copying(size, CALLS)
    return lambda: copy


if __name__ == "__main__":
    main()
