"""A verify and its commit under REPLAY, against SNAPSHOT in the same run: the ratio by batch and T.

Steps follow one another in one cache, each accepting 70 % of T on average, bonus included, so that the ring's cursors
advance as they do at work: histories of all lengths, and a fold now and then.

Run as `python -m benchmarks.replay`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import mamba_spec_jax as ms
from benchmarks.timing import Prepare, measure, parser, report, rounded
from mamba_spec_jax.assets import TINY

STEPS = 32  # in one timed run
SHARE = 0.7  # of T that a step accepts
STRATEGIES = (ms.CommitStrategy.SNAPSHOT, ms.CommitStrategy.REPLAY)


def main() -> None:
    arguments = parser(__doc__, rounds=9)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--widths", type=int, nargs="+", default=[4, 8], metavar="T")
    options = arguments.parse_args()
    loaded = ms.load(TINY)
    results = []
    for batch, width in itertools.product(options.batches, options.widths):
        cases = {strategy: steps(loaded, strategy, batch, width) for strategy in STRATEGIES}
        samples = measure(cases, options.rounds)
        snapshot, replay = STRATEGIES
        results.append(
            {
                "batch": batch,
                "T": width,
                "ring": 4 * width,
                "seconds_a_step": {case.value: rounded(samples.median(case) / STEPS) for case in STRATEGIES},
                "replay_over_snapshot": rounded(samples.ratio(replay, snapshot)),
            }
        )
    report(options.json, "replay", {"model": TINY.name, "rounds": options.rounds, "accepted": SHARE}, results)


def steps(loaded: ms.LoadedModel, strategy: ms.CommitStrategy, batch: int, width: int) -> Prepare:
    """STEPS verifies of random tokens with their commits, from an empty cache."""
    ring = ms.ReplayRing(length=4 * width, window=width)
    model = ms.HybridModel.create(loaded.model.config, strategy=strategy, replay=ring)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(1, model.vocab_size, (STEPS, batch, width)), jnp.int32)
    last = jnp.asarray(rng.binomial(width - 1, (SHARE * width - 1) / (width - 1), (STEPS, batch)), jnp.int32)
    slots, drafts = jnp.arange(batch, dtype=jnp.int32), jnp.full(batch, width - 1, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, cache):
        def step(i, cache):
            output = model.verify(params, ms.Draft(tokens[i], drafts, slots), cache)
            return model.backend.update_mamba_state_after_mtp_verify(output.cache, output.record, last[i])

        return jax.lax.fori_loop(0, STEPS, step, cache)

    def prepare():
        cache = jax.block_until_ready(model.init_cache(batch, STEPS * width))
        return lambda: run(loaded.params, cache)

    return prepare


if __name__ == "__main__":
    main()
