"""Whether speculation changes anything: one compiled step run without drafts, and with all kinds of them."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mamba_spec_jax.array_types import Array, Bool, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.speculative.drafters.ngram import NgramDrafter
from mamba_spec_jax.speculative.generate import Generation, collect, start_generation
from mamba_spec_jax.speculative.protocol import Progress, Proposal
from mamba_spec_jax.speculative.sampling import TokenChoice
from mamba_spec_jax.speculative.stop import StopReason


@flax.struct.dataclass
class Script:
    """What a `ScriptedDrafter` says.

    Attributes:
        tokens: `[B, N]` to propose where the first, second, ... new token is due.
        starts: `[B]` length of each row's prompt.
        followed: `[]` whether they are proposed; else it is prompt lookup.
    """

    tokens: Tokens
    starts: Rows
    followed: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter:
    """Proposes what its parameters, a `Script`, say: whatever the drafts are, the compiled program is the same.

    Attributes:
        max_drafts: K, proposed in every step.
    """

    max_drafts: int

    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposes_trees: ClassVar[bool] = False

    def init(self, batch: int, max_len: int) -> tuple[()]:
        """No state."""
        return ()

    def propose(
        self, params: Script, state: tuple[()], tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` tokens a row, or none where prompt lookup finds none; as `Drafter.propose`."""
        found = NgramDrafter(self.max_drafts).propose(None, state, tokens, lengths, choose, num_drafts)
        columns = (lengths - params.starts)[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)
        last = params.tokens.shape[1] - 1
        scripted = jnp.take_along_axis(params.tokens, jnp.clip(columns, 0, last), axis=1)
        return Proposal(
            tokens=jnp.where(params.followed, scripted, found.tokens),
            counts=jnp.where(params.followed, num_drafts, found.counts),
            state=state,
        )

    def update(self, params: Script, state: tuple[()], progress: Progress) -> tuple[()]:
        """Nothing to follow."""
        return state


@dataclasses.dataclass(frozen=True)
class Run:
    """A generation, and what the cache holds after it.

    Attributes:
        generation: with log-probabilities.
        states: by name, recurrent states and windows, and the keys and values of committed tokens.
    """

    generation: Generation
    states: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A run with drafts against the one without.

    Attributes:
        drafts: what was drafted.
        mean_acceptance_length: tokens emitted a pass.
        first_differences: the first token of each row that plain decoding has otherwise; None for an identical row.
        state_differences: greatest difference in each state that has not the same bits.
        logprob_difference: greatest difference of an emitted token's log-probability, over the tokens before a row's
            first difference.
        judged_passes: verify passes of each row, and how many its drafts, certain to be right or wrong, should take;
            None where that is not known beforehand.
    """

    drafts: str
    mean_acceptance_length: float
    first_differences: list[int | None]
    state_differences: dict[str, float]
    logprob_difference: float
    judged_passes: tuple[list[int], int] | None = None

    @property
    def same_tokens(self) -> bool:
        return all(at is None for at in self.first_differences)

    @property
    def judged_rightly(self) -> bool:
        """Whether exactly the right drafts were accepted, where it is known which are right."""
        return self.judged_passes is None or all(passes == self.judged_passes[1] for passes in self.judged_passes[0])

    @property
    def passed(self) -> bool:
        """Whether tokens, states and log-probabilities are plain decoding's to the bit, and drafts judged rightly.

        Without the latter a run in which no draft was accepted would pass as one in which all were.
        """
        return self.same_tokens and not self.state_differences and self.logprob_difference == 0 and self.judged_rightly


def check(
    model: HybridModel, params: Any, prompts: Sequence[Sequence[int]], max_new: int, num_drafts: int
) -> Iterator[Verdict]:
    """Decodes greedily without drafts, then with prompt lookup's, with only wrong ones, and with only right ones.

    All of it runs in the same compiled programs, so that every difference is one that drafts make.

    Args:
        model: under `SpeculativeMode.DECODE`, whose step recurrence does not depend on a token's index.
        params: its weights.
        prompts: token ids of each row.
        max_new: N, tokens to emit in each row.
        num_drafts: K, drafts a step.

    Raises:
        ValueError: for prompts that do not fit the model, or a model whose logits are not numbers.
    """
    starts = np.asarray([len(prompt) for prompt in prompts], np.int32)
    nothing = np.zeros((len(prompts), max_new), np.int32)

    def run(tokens: np.ndarray, followed: bool, limit: int = num_drafts) -> Run:
        script = Script(jnp.asarray(tokens, jnp.int32), jnp.asarray(starts), jnp.asarray(followed))
        return _run(model, params, prompts, ScriptedDrafter(num_drafts), script, limit, max_new)

    plain = run(nothing, followed=False, limit=0)
    if StopReason.NO_LOGITS in plain.generation.reasons:
        raise ValueError("the model's logits are not numbers, or all of them are -inf: its weights are damaged")
    own = np.asarray(plain.generation.tokens, np.int32)
    yield _judge("prompt lookup", plain, run(nothing, followed=False))
    yield _judge("all wrong", plain, run((own + 1) % model.vocab_size, followed=True), max_new)
    yield _judge("all right", plain, run(own, followed=True), -(-max_new // (num_drafts + 1)))


def _run(
    model: HybridModel, params: Any, prompts: Sequence[Sequence[int]], drafter: ScriptedDrafter, script: Script,
    limit: int, max_new: int,
) -> Run:  # fmt: skip
    state, chunks = start_generation(
        model, params, prompts, max_new=max_new, drafter=drafter, drafter_params=script, depth_limit=limit,
        logprobs=True,
    )  # fmt: skip
    for newest, _ in chunks:
        state = newest
    slots = jnp.arange(len(prompts), dtype=jnp.int32)
    return Run(collect(state), _states(model.materialize(state.cache, slots)))


def _states(cache: HybridCache) -> dict[str, np.ndarray]:
    """Everything that the next token depends on, of a cache without history in a ring.

    Rows of keys and values past a slot's length may hold anything.
    """
    cache = jax.device_get(cache)
    committed = np.arange(cache.max_len) < cache.lengths[:, None]
    visible = {
        "mamba": {"ssm": cache.mamba.ssm, "conv": cache.mamba.conv},
        "kv": jax.tree.map(lambda buffer: buffer[committed], cache.kv),
        "lengths": cache.lengths,
    }
    leaves = jax.tree_util.tree_leaves_with_path(visible)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _judge(drafts: str, plain: Run, other: Run, passes: int | None = None) -> Verdict:
    ours, theirs = (np.asarray(run.generation.tokens) for run in (other, plain))
    differs = ours != theirs
    same_so_far = ~np.logical_or.accumulate(differs, axis=1)
    logprobs = [np.asarray(run.generation.logprobs) for run in (other, plain)]
    return Verdict(
        drafts=drafts,
        mean_acceptance_length=float(other.generation.statistics.mean_acceptance_length),
        first_differences=[int(row.argmax()) if row.any() else None for row in differs],
        state_differences={
            name: _greatest_difference(other.states[name], state)
            for name, state in plain.states.items()
            if other.states[name].tobytes() != state.tobytes()
        },
        logprob_difference=float(np.abs(np.subtract(*logprobs))[same_so_far].max(initial=0)),
        judged_passes=None if passes is None else (other.generation.statistics.passes.tolist(), passes),
    )


def _greatest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:  # keys and values of another number of tokens
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max())
