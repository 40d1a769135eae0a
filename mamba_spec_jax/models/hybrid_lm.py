"""A hybrid language model, as the static side of it that runs the weights over a cache."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_spec_jax.array_types import Parents, Rows, Tokens, require_array
from mamba_spec_jax.attention.base import ForwardBatch
from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.attention.hybrid import HybridAttnBackend
from mamba_spec_jax.attention.hybrid_linear import HybridLinearAttnBackend
from mamba_spec_jax.cache.pools import HybridCache, advance_lengths
from mamba_spec_jax.cache.records import Draft, ModelOutput, require_draft
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.network import HybridLM, abstract_split, require_params
from mamba_spec_jax.models.strategy import choose_strategy
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ForwardMode, ReplayRing, SpeculativeMode
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class HybridModel:
    """The static side of a hybrid model; weights come in as `params`, state as `cache`.

    Fulfils `mamba_spec_jax.speculative.protocol.SpeculativeModel`.

    Attributes:
        config: what the model is.
        policy: dtypes.
        backend: what mixes tokens and owns the commit.
        graphdef: structure of the flax module, from `nnx.split`.
        hidden_layers: layers whose outputs every pass returns as `hidden`.
    """

    config: HybridConfig
    policy: DTypePolicy
    backend: HybridAttnBackend
    graphdef: Any
    hidden_layers: tuple[int, ...] = ()

    @classmethod
    def create(
        cls,
        config: HybridConfig,
        policy: DTypePolicy | None = None,
        *,
        speculative_mode: SpeculativeMode = SpeculativeMode.DECODE,
        strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
        replay: ReplayRing = ReplayRing(),  # noqa: B008, frozen
        batch: int | None = None,
        hidden_layers: tuple[int, ...] = (),
        implementation: Implementation | None = None,
    ) -> "HybridModel":
        """The model without weights.

        Args:
            config: what the model is.
            policy: dtypes; None is all float32.
            speculative_mode: which child verifies.
            strategy: what a verify pass keeps for the commit.
            replay: how much the ring of REPLAY holds.
            batch: rows at once, for AUTO to choose by; see `choose_strategy`.
            hidden_layers: layers whose outputs a drafter reads.
            implementation: of every kernel, "xla" or "triton"; None lets the device decide for each.
        """
        policy = policy or DTypePolicy()
        if strategy is CommitStrategy.AUTO:
            if batch is None:
                raise ValueError("CommitStrategy.AUTO chooses by the batch: pass batch, how many rows decode at once")
            strategy = choose_strategy(batch, replay.window).strategy
        _check_hidden_layers(hidden_layers, config)

        def child(verify: SpeculativeMode) -> HybridLinearAttnBackend:
            linear = config.recurrent.backend(
                verify=verify, strategy=strategy, replay=replay, implementation=implementation
            )
            return HybridLinearAttnBackend(
                num_layers=len(config.layer_types),
                full_attn_layers=config.attention_layers,
                full=FullAttention(scale=config.attention_scale, implementation=implementation),
                linear=linear,
                pool_spec=config.pool_spec(policy, linear),
                linear_attn_layers=config.recurrent_layers,
            )

        backend = HybridAttnBackend.create(
            prefill=child(SpeculativeMode.PREFILL),
            decode=child(SpeculativeMode.DECODE),
            speculative_mode=speculative_mode,
        )
        graphdef, _ = abstract_split(config, policy)
        return cls(config, policy, backend, graphdef, hidden_layers)

    @property
    def strategy(self) -> CommitStrategy:
        """What a verify pass keeps for the commit."""
        return self.backend.decode.linear.strategy  # type: ignore[attr-defined]  # both children are made by `create`

    def with_hidden_layers(self, hidden_layers: tuple[int, ...]) -> "HybridModel":
        """The same model, returning the outputs of other layers; its weights are the same too."""
        _check_hidden_layers(hidden_layers, self.config)
        return dataclasses.replace(self, hidden_layers=hidden_layers)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_params(self) -> int:
        """How many weights the model has, a tied embedding counted once."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.abstract_params()))

    def init_params(self, seed: int) -> Any:
        """Random weights."""
        return nnx.split(HybridLM(self.config, self.policy, nnx.Rngs(seed)))[1]

    def abstract_params(self) -> Any:
        """The weights' shapes and dtypes, allocating nothing."""
        return abstract_split(self.config, self.policy)[1]

    def init_cache(self, slots: int, max_len: int) -> HybridCache:
        """An empty cache of `slots` slots with room for `max_len` tokens each.

        Raises:
            ValueError: the rotary embedding has other frequencies in texts of that length; see `require_room`.
        """
        self._require_room(max_len)
        return HybridCache.create(self.backend.pool_spec, slots, max_len)

    def prefill(
        self,
        params: Any,
        tokens: Tokens,
        cache: HybridCache,
        *,
        slots: Rows,
        num_tokens: Rows,
        kv_len: int | None = None,
        mode: ForwardMode = ForwardMode.EXTEND,
    ) -> ModelOutput:
        """Appends a chunk of prompt to each row's slot.

        Args:
            params: weights.
            tokens: `[B, T]`; feed prompts in power-of-two chunks, each T is traced once.
            cache: donate it.
            slots: `[B]` slot of each row, -1 for padding.
            num_tokens: `[B]` real tokens of each row, 0..T. Tokens for which the slot has no room are not read.
            kv_len: cache positions attention looks at (static); None looks at all.
            mode: EXTEND, or DRAFT_EXTEND when a drafter catches up, or IDLE.

        Returns:
            `logits [B, V]` after each row's last real token, and the advanced cache.
        """
        if mode.defers_state:
            raise ValueError(f"prefill got mode {mode.name}, expected EXTEND, DRAFT_EXTEND or IDLE")
        lm, tokens, batch = self._begin("prefill", mode, params, tokens, cache, slots, num_tokens, kv_len)
        x, cache, _, hidden = lm(tokens, self.backend, cache, batch, self.hidden_layers)
        last = jnp.maximum(batch.num_tokens - 1, 0)[:, None, None]
        logits = lm.logits(jnp.take_along_axis(x, last, axis=1)[:, 0])
        if mode is not ForwardMode.IDLE:
            cache = dataclasses.replace(cache, lengths=advance_lengths(cache, batch.slots, batch.num_tokens))
        return ModelOutput(logits=logits, cache=cache, hidden=hidden)

    def verify(
        self,
        params: Any,
        draft: Draft,
        cache: HybridCache,
        *,
        kv_len: int | None = None,
        mode: ForwardMode = ForwardMode.TARGET_VERIFY,
    ) -> ModelOutput:
        """Runs root and drafts in one pass. Pools stay as they are until the commit of the returned record.

        Args:
            params: weights.
            draft: the window, a chain or a tree; drafts outside the vocabulary are left out, see `Draft.within`. A
                tree's node is written at most T rows after the committed ones, whatever its depth: leave room for
                all of it. Nodes without room are not read, and cannot be committed.
            cache: donate it; keys and values past the committed length are written.
            kv_len: cache positions attention looks at (static); None looks at all.
            mode: TARGET_VERIFY, or DECODE for a window that the decode child must run.

        Returns:
            `logits [B, T, V]`, the cache awaiting its commit, and the record to commit it with.
        """
        if not mode.defers_state:
            raise ValueError(f"verify got mode {mode.name}, expected TARGET_VERIFY or DECODE")
        require_draft("verify", draft)
        draft = draft.within(self.vocab_size)
        lm, tokens, batch = self._begin(
            "verify", mode, params, draft.tokens, cache, draft.slots, draft.num_tokens, kv_len, draft.parents
        )
        x, cache, record, hidden = lm(tokens, self.backend, cache, batch, self.hidden_layers)
        return ModelOutput(lm.logits(x), cache, record, hidden)

    def decode(
        self, params: Any, tokens: Rows, cache: HybridCache, *, slots: Rows, kv_len: int | None = None
    ) -> ModelOutput:
        """One token a row: a verify of T = 1 and its commit.

        Args:
            params: weights.
            tokens: `[B]`.
            cache: donate it.
            slots: `[B]` slot of each row, -1 for padding.
            kv_len: cache positions attention looks at (static).

        Returns:
            `logits [B, V]` and the advanced cache. A row whose slot has no room stays as it is.
        """
        require_array("decode got tokens", tokens, ("B",))
        require_array("decode got slots", slots, tokens.shape)
        draft = Draft(tokens=tokens[:, None], counts=jnp.zeros_like(slots), slots=slots)
        output = self.verify(params, draft, cache, kv_len=kv_len, mode=ForwardMode.DECODE)
        cache = self.backend.update_mamba_state_after_mtp_verify(
            output.cache,
            output.record,  # type: ignore[arg-type]  # a verify always returns one
            jnp.zeros_like(slots),
        )
        return dataclasses.replace(output, logits=output.logits[:, 0], cache=cache, record=None)

    def materialize(self, cache: HybridCache, slots: Rows) -> HybridCache:
        """The cache with all that `slots [B]` hold in `cache.mamba.ssm`, to be read or exported; see the backend's."""
        return self.backend.decode.materialize(cache, slots)  # type: ignore[attr-defined]  # made by `create`

    def _begin(
        self, caller: str, mode: ForwardMode, params: Any, tokens: Tokens, cache: HybridCache,
        slots: Rows, num_tokens: Rows, kv_len: int | None, parents: Parents | None = None,
    ) -> tuple[HybridLM, Tokens, ForwardBatch]:  # fmt: skip
        require_array(f"{caller} got tokens", tokens, ("B", "T"))
        require_array(f"{caller} got slots", slots, tokens.shape[:1])
        require_array(f"{caller} got num_tokens", num_tokens, tokens.shape[:1])
        if tokens.shape[1] < 1:
            raise ValueError(f"{caller} got tokens {tokens.dtype}{list(tokens.shape)}, expected T of at least 1")
        require_params(caller, self.config, self.policy, params)
        batch = ForwardBatch.create(mode, cache, slots, num_tokens, tokens.shape[1], kv_len, parents)
        self._require_room(cache.max_len)
        # Columns of padding may hold anything, and an id outside the vocabulary would be embedded as NaN.
        return nnx.merge(self.graphdef, params), jnp.where(batch.is_real, tokens, 0), batch

    def _require_room(self, max_len: int) -> None:
        if self.config.rope_theta is not None and self.config.rope_scaling is not None:
            self.config.rope_scaling.require_room(max_len)


def _check_hidden_layers(hidden_layers: tuple[int, ...], config: HybridConfig) -> None:
    unknown = [i for i in hidden_layers if not 0 <= i < len(config.layer_types)]
    if unknown:
        raise ValueError(f"hidden_layers {unknown} do not exist, expected 0..{len(config.layer_types) - 1}")
