"""DFlash: a whole block of drafts in one pass of a block-diffusion head."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from mamba_spec_jax.array_types import Rows, Tokens
from mamba_spec_jax.speculative.protocol import BlockHead, Progress, Proposal
from mamba_spec_jax.speculative.sampling import TokenChoice


@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """Fills the positions behind each row's last token at once, reading the target's hidden states (DFlash, 2026).

    The state is the head's cache: keys and values of everything that the target has read, which is the text without
    its last token.

    Attributes:
        head: the static side of the head.
        max_drafts: K, the most tokens proposed; one less than the block that the head was trained for, or fewer.
        mask_token: the token that stands for a position to be filled.
    """

    head: BlockHead
    max_drafts: int
    mask_token: int
    proposes_trees: ClassVar[bool] = False

    def __post_init__(self):
        if self.max_drafts < 1:
            raise ValueError(f"DFlashDrafter.max_drafts is {self.max_drafts}, expected at least 1")
        if not 0 <= self.mask_token < self.head.config.vocab_size:
            raise ValueError(
                f"DFlashDrafter.mask_token is {self.mask_token}, expected 0..{self.head.config.vocab_size - 1}"
            )

    @property
    def vocab_size(self) -> int:
        return self.head.config.vocab_size

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.head.config.target_layers

    def init(self, batch: int, max_len: int) -> Any:
        """A head that has read nothing."""
        return self.head.init_cache(batch, max_len)

    def propose(
        self, params: Any, state: Any, tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes `num_drafts` tokens in every row; arguments as `Drafter.propose`'s."""
        root = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        masks = jnp.full((lengths.size, num_drafts), self.mask_token, jnp.int32)
        hidden, state = self.head.fill(params, jnp.concatenate([root, masks], axis=1), state)
        positions = lengths[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)
        return Proposal(
            tokens=choose(self.head.logits(params, hidden[:, 1:]), positions),
            lengths=jnp.full(lengths.shape, num_drafts, jnp.int32),
            state=state,
        )

    def update(self, params: Any, state: Any, progress: Progress) -> Any:
        """Reads the target's hidden states of what was accepted; the block that was drafted is written over."""
        return self.head.read(params, progress.hidden, state, progress.counts)
