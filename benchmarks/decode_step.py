"""Cost of a decode step: verify(T) over decode, and where the time of a step goes.

Steps run inside a compiled loop, as they do in a generation. Rows draft nothing, so that each step emits one token a
row whatever T is: only the width differs.

Run as `python -m benchmarks.decode_step`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mamba_spec_jax as ms
from benchmarks.timing import Prepare, Samples, measure, parser, report, rounded
from mamba_spec_jax.cli.options import BUNDLED, title_of
from mamba_spec_jax.cli.prompts import PromptKind, demo_prompts

METHODS: dict[str, ms.Greedy | ms.Sampling] = {"greedy": ms.Greedy(), "sampled": ms.Sampling()}
STEPS = 16


def main() -> None:
    arguments = parser(__doc__, rounds=15)
    arguments.add_argument("--model", default=BUNDLED, help="folder or hub id (default: the bundled model)")
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    arguments.add_argument("--widths", type=int, nargs="+", default=list(range(1, 18)), metavar="T")
    arguments.add_argument("--parts", type=int, nargs="*", default=[1, 5, 9], metavar="T", help="widths taken apart")
    options = arguments.parse_args()
    loaded = ms.load(options.model)

    results = []
    for batch in options.batch:
        bench = StepBench(loaded, batch, max(*options.widths, *options.parts))
        steps = {f"T = {width}": bench.step(width) for width in sorted({1, *options.widths})}
        parts = {f"T = {width}, {part}": run for width in options.parts for part, run in bench.parts(width).items()}
        samples = measure(steps | parts, options.rounds)
        results.append(
            {
                "batch": batch,
                "verify_over_decode": {case: rounded(samples.ratio(case, "T = 1")) for case in steps},
                "microseconds": {case: _microseconds(samples, case) for case in steps},
                "parts_microseconds": {case: _microseconds(samples, case) for case in parts},
            }
        )
    report(options.json, "decode_step", {"model": title_of(options.model), "rounds": options.rounds}, results)


def _microseconds(samples: Samples, case: str) -> float:
    return rounded(samples.median(case) / STEPS * 1e6)


class StepBench:
    """A batch in the middle of a generation, and compiled loops over it."""

    def __init__(self, loaded: ms.LoadedModel, batch: int, max_width: int):
        tokenizer: Any = loaded.tokenizer
        prompts = [tokenizer.encode(text).ids for text in demo_prompts(PromptKind.FREE, batch)]
        self._model, self._params = loaded.model, loaded.params
        self._decoder = ms.Decoder(loaded.model, ms.NgramDrafter(max_width - 1))
        self._state = self._decoder.init(ms.Weights(loaded.params), prompts, max_new=64, depth_limit=0)

    def step(self, width: int) -> Prepare:
        """Whole steps."""
        steps = jax.jit(dataclasses.replace(self._decoder, num_drafts=width - 1).steps, static_argnames="num_steps")
        return lambda: lambda: steps(ms.Weights(self._params), self._state, num_steps=STEPS)

    def parts(self, width: int) -> dict[str, Prepare]:
        """What a step is made of, each in a loop of its own; they leave out what holds a step together."""
        state, model = self._state, self._model
        rows = state.requests.slots
        draft = ms.Draft(
            tokens=jnp.broadcast_to(state.tokens[:, :1], (rows.size, width)),
            counts=jnp.full_like(rows, width - 1),
            slots=rows,
        )
        output = jax.jit(model.verify)(self._params, draft, state.cache)
        accepting = {f"accept {name}": functools.partial(_accept, method, state) for name, method in METHODS.items()}
        parts = {
            "verify": self._repeated(self._verify, draft, dataclasses.replace(output, cache=state.cache)),
            "commit": self._repeated(self._commit, output.record, output.cache),
        }
        for name, accept in accepting.items():
            parts[name] = self._repeated(accept, (draft, output.logits))
        if width > 1:
            propose = functools.partial(self._propose, width - 1)
            parts["propose"] = self._repeated(propose, (state.tokens, state.lengths))
        return parts

    def _repeated(self, part: Callable, given: Any, carry: Any = None) -> Prepare:
        """As many repetitions as there are steps.

        Each part adds a zero that the compiler cannot know to be one, or the work would be done once, outside the loop;
        and its whole result is carried, or what nobody reads would not be done at all.
        """

        @jax.jit
        def loop(params, given, carry):
            def body(i, carry):
                return part(params, given, carry, jnp.minimum(i, 0))

            return jax.lax.fori_loop(0, STEPS, body, carry)

        if carry is None:
            shapes = jax.eval_shape(part, self._params, given, None, jnp.int32(0))
            carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return lambda: lambda: loop(self._params, given, carry)

    def _verify(self, params, draft, output, zero):
        draft = dataclasses.replace(draft, tokens=draft.tokens + zero, slots=draft.slots + zero)
        output = self._model.verify(params, draft, output.cache)
        return dataclasses.replace(output, cache=dataclasses.replace(output.cache, awaiting_commit=False))

    def _commit(self, params, record, cache, zero):
        steps = jnp.zeros_like(record.slots) + zero
        committed = self._model.backend.update_mamba_state_after_mtp_verify(cache, record, steps)
        # As before the commit, or the next one would leave alone slots that have moved on from the record.
        return dataclasses.replace(committed, awaiting_commit=True, lengths=cache.lengths)

    def _propose(self, num_drafts, params, text, proposal, zero):
        tokens, lengths = text
        return self._drafter.propose(None, (), tokens + zero, lengths, None, num_drafts)


def _accept(method, state, params, given, result, zero):
    draft, logits = given
    return ms.accept(
        method,
        logits + zero.astype(logits.dtype),
        draft,
        seeds=state.requests.seeds,
        positions=state.lengths[:, None] + jnp.arange(logits.shape[1], dtype=jnp.int32),
        temperature=state.requests.temperature,
        filters=state.requests.filters,
    )


if __name__ == "__main__":
    main()
