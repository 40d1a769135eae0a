"""A smaller language model as drafter, whose own recurrent state follows by the target's own commit."""

import dataclasses
from typing import Any, ClassVar, Protocol

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Rows, Tokens
from mamba_spec_jax.cache.pools import HybridCache
from mamba_spec_jax.cache.records import Draft, ModelOutput, VerifyRecord
from mamba_spec_jax.modes import ForwardMode
from mamba_spec_jax.speculative.protocol import Progress, Proposal, SpeculativeModel
from mamba_spec_jax.speculative.sampling import TokenChoice
from pallas_kernels import loops


class DraftModel(SpeculativeModel, Protocol):
    """A model that can also be told that it is a drafter's."""

    def prefill(
        self, params: Any, tokens: Tokens, cache: HybridCache, *, slots: Rows, num_tokens: Rows,
        mode: ForwardMode = ForwardMode.EXTEND,
    ) -> ModelOutput:  # fmt: skip
        """As `SpeculativeModel.prefill`, in mode DRAFT_EXTEND."""
        ...


@flax.struct.dataclass
class DraftModelState:
    """What a `DraftModelDrafter` remembers.

    Attributes:
        cache: the draft model's, slot b for row b; between `propose` and `update` it awaits the commit of `pending`.
        pending: what the draft model read while proposing, K + 1 tokens; None between steps.
    """

    cache: HybridCache
    pending: VerifyRecord | None = None


@dataclasses.dataclass(frozen=True)
class DraftModelDrafter:
    """Drafts a chain, token by token, with a smaller language model (Leviathan et al. 2023; Chen et al. 2023).

    The model runs ahead on a scratch copy of its recurrent state and reads the root and all K drafts, the last one too,
    so that any accepted prefix can be committed. Drafts are chosen with the target's noise, hence count as chosen
    outright: see `TokenChoice`.

    Attributes:
        model: the draft model, of the target's vocabulary; its weights arrive as `params`.
        max_drafts: K, the most tokens proposed.
    """

    model: DraftModel
    max_drafts: int
    hidden_layers: ClassVar[tuple[int, ...]] = ()
    proposes_trees: ClassVar[bool] = False

    def __post_init__(self):
        if self.max_drafts < 1:
            raise ValueError(f"DraftModelDrafter.max_drafts is {self.max_drafts}, expected at least 1")

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def init(self, batch: int, max_len: int) -> DraftModelState:
        """A draft model that has read nothing; ValueError for one with the strategy REPLAY."""
        cache = self.model.init_cache(batch, max_len)
        if cache.mamba.ring is not None:
            raise ValueError(
                "a draft model steps ahead of what will be accepted, and a ring of inputs cannot be taken back: create "
                "it with CommitStrategy.SNAPSHOT (its target may have any strategy)"
            )
        return DraftModelState(cache)

    def propose(
        self, params: Any, state: DraftModelState, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` tokens in every row; arguments as `Drafter.propose`'s.

        Keys and values are written in place, past the committed length; pools and lengths stay as they are.
        """
        if not 1 <= num_drafts <= self.max_drafts:
            raise ValueError(
                f"DraftModelDrafter got num_drafts={num_drafts}, expected 1..{self.max_drafts} (max_drafts)"
            )
        root = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
        slots, only_root = jnp.arange(lengths.size, dtype=jnp.int32), jnp.zeros_like(lengths)

        def step(carry, at):
            token, scratch = carry
            output = self.model.verify(params, Draft(token[:, None], only_root, slots), scratch)
            scratch = self._commit(output.cache, output.record, only_root)
            return (choose(output.logits[:, 0], lengths + at), scratch), (token, output.record)

        steps = jnp.arange(num_drafts + 1, dtype=jnp.int32)
        (_, scratch), (read, records) = loops.scan(step, (root, state.cache), steps)
        cache = dataclasses.replace(state.cache, kv=scratch.kv, awaiting_commit=True)
        return Proposal(
            tokens=read[1:].T,
            counts=jnp.full(lengths.shape, num_drafts, jnp.int32),
            state=DraftModelState(cache, _one_window(records)),
        )

    def update(self, params: Any, state: DraftModelState, progress: Progress) -> DraftModelState:
        """Commits what was accepted of the drafts; reads it first if the draft model has not, and prompts always."""
        slots = jnp.where(progress.counts > 0, jnp.arange(progress.counts.size, dtype=jnp.int32), -1)
        if progress.mode is ForwardMode.EXTEND:
            output = self.model.prefill(
                params,
                progress.tokens,
                state.cache,
                slots=slots,
                num_tokens=progress.counts,
                mode=ForwardMode.DRAFT_EXTEND,
            )
            return DraftModelState(output.cache)
        cache, record, last = state.cache, state.pending, progress.counts - 1
        if record is not None and not progress.as_proposed:
            cache, record = self._commit(cache, record, jnp.full_like(last, -1)), None  # nothing of it
        if record is None:
            output = self.model.verify(params, Draft(progress.tokens, last, slots), cache)
            cache, record = output.cache, output.record
        return DraftModelState(self._commit(cache, record, last))

    def _commit(self, cache: HybridCache, record: VerifyRecord | None, last: Rows) -> HybridCache:
        if record is None:
            raise ValueError(f"{type(self.model).__name__}.verify returned no record, expected what its commit needs")
        return self.model.backend.update_mamba_state_after_mtp_verify(cache, record, last)


def _one_window(records: VerifyRecord) -> VerifyRecord:
    """The record of one pass over K + 1 tokens, from those of K + 1 passes over one, stacked along a first axis.

    The state after a token, `[L, B, T, ...]`, is the same however its window was cut, as each pass went on from the
    state that the one before it had committed to the scratch copy. Convolution windows are formed at the commit, from
    the raw inputs and the slot's old window; that must be the window before the first of these tokens, and it is, since
    the live pool was not touched.
    """

    def join(leaf: Array) -> Array:
        return jnp.moveaxis(leaf[:, :, :, 0], 0, 2)

    return VerifyRecord(
        slots=records.slots[0],
        num_tokens=jnp.sum(records.num_tokens, axis=0, dtype=jnp.int32),
        held=records.held[0],
        recurrent=join(records.recurrent),
        conv_inputs=join(records.conv_inputs),
        spec=records.spec,
        layers=records.layers,
    )
