"""Cost of a commit: against the number of slots, against T, and against a copy of as many bytes.

The bytes that a commit moves depend on the batch alone. So should its time: neither more slots nor more snapshots to
choose from may cost anything.

Run as `python -m benchmarks.commit`.
"""

import jax
import jax.numpy as jnp

from benchmarks.timing import Prepare, measure, parser, report, rounded
from pallas_kernels import state_commit, state_scatter
from pallas_kernels.state_commit import shapes as commit_shapes
from pallas_kernels.state_scatter import shapes as scatter_shapes

SHAPE = commit_shapes.CommitShape(layers=8, state=(16, 64, 64), channels=1280, conv_width=4, conv_dtype=jnp.float32)
OPS = {"state_commit": ("ssm", "conv"), "state_scatter": ("dst",)}
CALLS = 8  # in one timed run


def main() -> None:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--slots", type=int, nargs="+", default=[16, 64, 256])
    arguments.add_argument("--widths", type=int, nargs="+", default=[2, 5, 9, 17], metavar="T")
    options = arguments.parse_args()
    base_slots, base_width = min(options.slots), 5
    sizes = [(slots, base_width) for slots in sorted(options.slots)]
    sizes += [(base_slots, width) for width in options.widths if width != base_width]

    results = []
    for op in OPS:
        cases = {f"{slots} slots, T = {width}": _op(op, slots, options.batch, width) for slots, width in sizes}
        cases["copy"] = _copy(_moved_bytes(options.batch))
        samples = measure(cases, options.rounds)
        base = f"{base_slots} slots, T = {base_width}"
        for slots, width in sizes:
            name = f"{slots} slots, T = {width}"
            results.append(
                {
                    "op": op,
                    "slots": slots,
                    "T": width,
                    "seconds": rounded(samples.median(name) / CALLS),
                    "over_base": rounded(samples.ratio(name, base)),
                    "over_copy": rounded(samples.ratio(name, "copy")),
                }
            )
    chosen = {
        "batch": options.batch,
        "rounds": options.rounds,
        "shape": SHAPE,
        "moved_bytes": _moved_bytes(options.batch),
    }
    report(options.json, "commit", chosen, results)


def _moved_bytes(batch: int) -> int:
    """Bytes written by one call: the states and windows of the batch."""
    given = commit_shapes.arguments(SHAPE, slots=batch, batch=batch, steps=1, tracked=False)
    return sum(given[name].size * given[name].dtype.itemsize for name in ("ssm", "conv"))


def _op(op: str, slots: int, batch: int, width: int) -> Prepare:
    shapes, function = {
        "state_commit": (commit_shapes, state_commit),
        "state_scatter": (scatter_shapes, state_scatter),
    }[op]
    given = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes.arguments(SHAPE, slots, batch, width, tracked=False)
    )
    order = jax.random.permutation(jax.random.key(0), slots)
    given["slots"] = order[:batch].astype(jnp.int32)
    given["steps"] = jnp.arange(batch, dtype=jnp.int32) % width
    names = OPS[op]
    pools = [given.pop(name) for name in names]
    call = jax.jit(lambda pools, given: function(*pools, **given), donate_argnums=0)

    def run():
        nonlocal pools
        for _ in range(CALLS):
            written = call(pools, given)
            pools = written if len(names) > 1 else [written]
        return pools

    return lambda: run


def _copy(size: int) -> Prepare:
    """A copy of `size` bytes into a buffer that exists."""
    source, target = jnp.ones((size // 4,), jnp.float32), jnp.zeros((size // 4 + 1,), jnp.float32)
    call = jax.jit(lambda into, source, at: jax.lax.dynamic_update_slice(into, source, (at,)), donate_argnums=0)

    def run():
        nonlocal target
        for n in range(CALLS):
            target = call(target, source, n % 2)
        return target

    return lambda: run


if __name__ == "__main__":
    main()
