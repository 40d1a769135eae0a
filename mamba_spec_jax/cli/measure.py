"""Plain against speculative decoding of the same prompts, in one run, with every compiled program warm."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np
from tokenizers import Tokenizer

from mamba_spec_jax.cli.prompts import PromptKind, demo_prompts
from mamba_spec_jax.speculative.chunks import decode_chunks
from mamba_spec_jax.speculative.decoder import Decoder
from mamba_spec_jax.speculative.draft_policy import DraftPolicy
from mamba_spec_jax.speculative.generate import Generation, collect, resolve_drafting
from mamba_spec_jax.speculative.sampling import Greedy, Sampling
from mamba_spec_jax.speculative.state import DecodeState, Weights
from mamba_spec_jax.text_generation import LoadedModel


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is generated.

    Attributes:
        kind: of the prompts.
        batch: prompts at once.
        temperature: 0 is greedy.
    """

    kind: PromptKind
    batch: int
    temperature: float

    def __str__(self) -> str:
        how = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return f"{self.kind.value}, batch {self.batch}, {how}"


@dataclasses.dataclass(frozen=True)
class Timing:
    """A generation and how long its decoding took.

    Attributes:
        generation: what came out.
        seconds: from the first step to the last, prefill not counted; the shortest of the repeats.
    """

    generation: Generation
    seconds: float

    @property
    def steps(self) -> int:
        """How many there were until the last row had finished."""
        return int(self.generation.statistics.passes.max())

    @property
    def tokens_per_second(self) -> float:
        """Over all rows."""
        return sum(map(len, self.generation.tokens)) / self.seconds

    @property
    def mean_acceptance_length(self) -> float:
        return float(self.generation.statistics.mean_acceptance_length)

    @property
    def histogram(self) -> list[int]:
        """Passes that emitted 1, 2, ... tokens, over all rows."""
        return np.asarray(self.generation.statistics.histogram).sum(axis=0).tolist()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One scenario, decoded plainly and with drafts.

    Attributes:
        scenario: what was generated.
        drafts: a step, or "auto".
        plain: without drafts.
        speculative: with them.
    """

    scenario: Scenario
    drafts: int | str
    plain: Timing
    speculative: Timing

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding."""
        return self.speculative.tokens_per_second / self.plain.tokens_per_second

    @property
    def cost_ratio(self) -> float:
        """Mean time of a step over that of a plain one: verify(T) / decode where the number of drafts is fixed."""
        return (self.speculative.seconds / self.speculative.steps) / (self.plain.seconds / self.plain.steps)

    @property
    def first_differences(self) -> list[int | None]:
        """The first token of each row that plain decoding has otherwise; None for an identical row."""
        rows = zip(self.plain.generation.tokens, self.speculative.generation.tokens, strict=True)
        return [_first_difference(plain, speculative) for plain, speculative in rows]

    @property
    def identical(self) -> bool:
        return all(difference is None for difference in self.first_differences)


class Bench:
    """Runs scenarios on one model; programs compiled for one scenario serve the next."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, *, max_new: int, repeats: int, seed: int = 0):
        """Every row generates `max_new` tokens; each time is the least of `repeats`, since noise only ever adds."""
        for name, value in (("max_new", max_new), ("repeats", repeats)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._max_new = max_new
        self._repeats = repeats
        self._seed = seed
        self._warm: set[tuple] = set()

    def compare(self, scenario: Scenario, drafts: Sequence[int | str]) -> list[Comparison]:
        """Plain decoding against each number of drafts, in turns, so that a busy machine slows all of them alike."""
        every = (0, *drafts)
        for num_drafts in every:
            self._warm_up(scenario, num_drafts)
        rounds = [[self._run(scenario, num_drafts) for num_drafts in every] for _ in range(self._repeats)]
        plain, *others = (min(runs, key=lambda run: run.seconds) for runs in zip(*rounds, strict=True))
        return [
            Comparison(scenario, num_drafts, plain, other) for num_drafts, other in zip(drafts, others, strict=True)
        ]

    def _warm_up(self, scenario: Scenario, num_drafts: int | str) -> None:
        state = self._prefill(scenario, num_drafts)
        programs = (state.tokens.shape, type(_method(scenario)), num_drafts)
        if programs not in self._warm:
            self._decode(scenario, num_drafts, state)
            self._warm.add(programs)

    def _run(self, scenario: Scenario, num_drafts: int | str) -> Timing:
        state = jax.block_until_ready(self._prefill(scenario, num_drafts))
        start = time.perf_counter()
        state = self._decode(scenario, num_drafts, state)
        seconds = time.perf_counter() - start
        return Timing(collect(state), seconds)

    def _prefill(self, scenario: Scenario, num_drafts: int | str) -> DecodeState:
        prompts = [self._tokenizer.encode(text).ids for text in demo_prompts(scenario.kind, scenario.batch)]
        decoder, _ = self._decoder(scenario, num_drafts)
        return decoder.init(
            Weights(self._loaded.params),
            prompts,
            max_new=self._max_new,
            seeds=self._seed if scenario.temperature else 0,
            temperature=scenario.temperature,
        )

    def _decode(self, scenario: Scenario, num_drafts: int | str, state: DecodeState) -> DecodeState:
        decoder, policy = self._decoder(scenario, num_drafts)
        for newest, _ in decode_chunks(decoder, Weights(self._loaded.params), state, policy):
            state = newest
        return jax.block_until_ready(state)

    def _decoder(self, scenario: Scenario, num_drafts: int | str) -> tuple[Decoder, DraftPolicy]:
        drafter, policy = resolve_drafting(None, num_drafts)
        return Decoder(self._loaded.model, drafter, _method(scenario), policy.max_drafts), policy


def _method(scenario: Scenario) -> Greedy | Sampling:
    return Sampling() if scenario.temperature else Greedy()


def _first_difference(plain: list[int], speculative: list[int]) -> int | None:
    pairs = zip(plain, speculative, strict=True)  # every row generates the same number
    return next((at for at, (a, b) in enumerate(pairs) if a != b), None)
