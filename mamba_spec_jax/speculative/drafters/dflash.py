"""DFlash: a whole block of drafts in one pass, or a few, of a block-diffusion head."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from mamba_spec_jax.array_types import Rows, Tokens
from mamba_spec_jax.speculative.protocol import BlockHead, Progress, Proposal, require_head
from mamba_spec_jax.speculative.sampling import TokenChoice


@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """Fills the positions after each row's last token at once, reading the target's hidden states (DFlash, 2026).

    In more passes than one, each fills as many of the positions as every other, from the left, and reads those filled
    before it; later tokens are still masked, and are predicted again.

    The state is the head's cache: keys and values of everything that the target has read, which is the text without
    its last token.

    Attributes:
        head: the static side of the head.
        max_drafts: K, the most tokens proposed; one less than the block that the head was trained for, or fewer.
        mask_token: the token that marks a position to be filled.
        passes: how many; published heads are trained for one.
    """

    head: BlockHead
    max_drafts: int
    mask_token: int
    passes: int = 1
    proposes_trees: ClassVar[bool] = False

    def __post_init__(self):
        require_head("DFlashDrafter", self.head, fills_blocks=True)
        for name in ("max_drafts", "passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"DFlashDrafter.{name} is {getattr(self, name)}, expected at least 1")
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
        block = jnp.pad(root, ((0, 0), (0, num_drafts)), constant_values=self.mask_token)
        positions = lengths[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None]
        share = -(-num_drafts // self.passes)
        for done in range(0, num_drafts, share):
            hidden, state = self.head.fill(params, block, state)
            now = slice(done, min(done + share, num_drafts))
            drafts = choose(self.head.logits(params, hidden[:, 1:][:, now]), positions[:, now])
            block = block.at[:, 1 + done : 1 + now.stop].set(drafts)
        return Proposal(block[:, 1:], jnp.full(lengths.shape, num_drafts, jnp.int32), state)

    def update(self, params: Any, state: Any, progress: Progress) -> Any:
        """Reads the target's hidden states of what was accepted; the block that was drafted is written over."""
        return self.head.read(params, progress.hidden, state, progress.counts)
