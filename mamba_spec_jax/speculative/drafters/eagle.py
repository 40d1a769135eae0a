"""EAGLE and multi-token prediction: a head on the target's hidden states, run on from its own."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Float, Rows, Tokens
from mamba_spec_jax.speculative.protocol import AutoregressiveHead, Progress, Proposal, require_head
from mamba_spec_jax.speculative.sampling import TokenChoice
from pallas_kernels import loops


@flax.struct.dataclass
class EagleState:
    """What an `EagleDrafter` remembers.

    Attributes:
        cache: the head's; follows the accepted text exactly, and ends one token before its last.
        hidden: `[B, L, D]` what each layer of the head said last.
    """

    cache: Any
    hidden: Float[Array, "B L D"]


@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """Drafts a chain, token by token, with a head on the target's hidden states.

    At each position the head's first layer reads the newest token and the target's hidden state before it, and what it
    says predicts the next token. A head of one layer is then run on from its own hidden states (EAGLE, Li et al. 2024
    and 2025; a single recursive prediction head). In a head of several each step takes the next layer, which reads the
    hidden states of the one before it (multi-token prediction, DeepSeek-AI 2024; multi-layer EAGLE); the last layer is
    run on if there are more steps than layers.

    Attributes:
        head: the static side of the head.
        max_drafts: K, the most tokens proposed.
    """

    head: AutoregressiveHead
    max_drafts: int
    proposes_trees: ClassVar[bool] = False

    def __post_init__(self):
        require_head("EagleDrafter", self.head, fills_blocks=False)
        if self.max_drafts < 1:
            raise ValueError(f"EagleDrafter.max_drafts is {self.max_drafts}, expected at least 1")

    @property
    def vocab_size(self) -> int:
        return self.head.config.vocab_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.head.config.target_layers

    def init(self, batch: int, max_len: int) -> EagleState:
        """A head that has read nothing."""
        config = self.head.config
        hidden = jnp.zeros((batch, config.num_layers, config.hidden_size), self.head.policy.activations)
        return EagleState(self.head.init_cache(batch, max_len), hidden)

    def propose(
        self, params: Any, state: EagleState, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` tokens in every row; arguments as `Drafter.propose`'s."""
        layers = self.head.config.num_layers
        hidden, kv = state.hidden[:, :1], state.cache.kv
        token = self._choose(params, hidden, choose, lengths)
        drafts = [token[:, None]]

        def step(carry, at, layer, offset):
            token, hidden, kv = carry
            cache = dataclasses.replace(state.cache, kv=kv)
            batch = self.head.window(cache, jnp.ones_like(lengths), 1, offset)
            hidden, cache = self.head.read(params, layer, token[:, None], hidden, cache, batch)
            token = self._choose(params, hidden, choose, lengths + at)
            return (token, hidden, cache.kv), token

        # Step `at` reads draft `at` in layer `at`, at the first position that this layer has not read for good.
        carry, at = (token, hidden, kv), 1
        while at < min(layers - 1, num_drafts):
            carry, token = step(carry, at, at, 0)
            drafts.append(token[:, None])
            at += 1
        if at < num_drafts:
            first = at
            carry, more = loops.scan(
                lambda carry, at: step(carry, at, layers - 1, at - first),
                carry,
                jnp.arange(first, num_drafts, dtype=jnp.int32),
            )
            drafts.append(more.T)
        cache = dataclasses.replace(state.cache, kv=carry[2])
        return Proposal(
            tokens=jnp.concatenate(drafts, axis=1),
            counts=jnp.full(lengths.shape, num_drafts, jnp.int32),
            state=dataclasses.replace(state, cache=cache),
        )

    def update(self, params: Any, state: EagleState, progress: Progress) -> EagleState:
        """Reads what was accepted, in every layer; whatever was drafted beyond it is written over later.

        A layer's hidden state at a position is what the next layer reads one position later, beside the newer token.
        """
        source = self.head.features(params, progress.hidden)
        batch = self.head.window(state.cache, progress.counts, source.shape[1])
        at = jnp.maximum(progress.counts - 1, 0)[:, None, None]
        cache, last = state.cache, []
        for layer in range(self.head.config.num_layers):
            before = state.hidden[:, layer]
            hidden, cache = self.head.read(params, layer, progress.following, source, cache, batch)
            newest = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
            last.append(jnp.where((progress.counts > 0)[:, None], newest, before))
            source = jnp.concatenate([before[:, None], hidden[:, :-1]], axis=1)
        cache = dataclasses.replace(cache, lengths=cache.lengths + progress.counts)
        return EagleState(cache, jnp.stack(last, axis=1))

    def _choose(self, params: Any, hidden: Array, choose: TokenChoice, positions: Rows) -> Rows:
        return choose(self.head.logits(params, hidden)[:, 0], positions)
