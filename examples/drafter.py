"""A drafter of your own: it proposes the token that last followed the newest one, again and again.

The class follows `mamba_spec_jax.Drafter`, which has three methods and three facts. Whatever a drafter proposes, the
text is the target's. Run it with `python examples/drafter.py`; it takes about 20 seconds on a CPU.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import mamba_spec_jax as ms
from mamba_spec_jax.assets import TINY

PROMPT = """
class Stack:
    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

class Queue:
    def push(self, item):
"""


@dataclasses.dataclass(frozen=True)
class BigramDrafter:
    """Remembers, for each row, which token followed each token last: a table `[B, V]`, its state."""

    vocab_size: int
    max_drafts: int = 4
    hidden_layers: ClassVar[tuple[int, ...]] = ()  # layers of the target whose hidden states it reads
    proposes_trees: ClassVar[bool] = False

    def init(self, batch, max_len):
        """The state before the first prompt token."""
        return jnp.zeros((batch, self.vocab_size), jnp.int32)

    def propose(self, params, state, tokens, lengths, choose, num_drafts):
        """`num_drafts` tokens after the last of the `lengths[b]` tokens of each row."""
        rows = jnp.arange(lengths.size)
        newest, drafts = tokens[rows, lengths - 1], []
        for _ in range(num_drafts):
            newest = state[rows, newest]
            drafts.append(newest)
        return ms.Proposal(jnp.stack(drafts, axis=1), jnp.full_like(lengths, num_drafts), state)

    def update(self, params, state, progress):
        """Learns from what the target has read: `following[b, t]` came after `tokens[b, t]`, for t < `counts[b]`."""
        real = jnp.arange(progress.tokens.shape[1]) < progress.counts[:, None]
        column = jnp.where(real, progress.tokens, self.vocab_size)  # past the end: not written
        return state.at[jnp.arange(len(state))[:, None], column].set(progress.following, mode="drop")


def main():
    loaded = ms.load(TINY)
    drafter = BigramDrafter(loaded.model.vocab_size)
    fast = loaded.generate(PROMPT, max_new=64, drafter=drafter)
    plain = loaded.generate(PROMPT, max_new=64, drafter=drafter, depth_limit=0)  # the same program without drafts
    print(fast.texts[0])
    print("identical to plain decoding:", fast.tokens == plain.tokens)
    print(f"{float(fast.statistics.mean_acceptance_length):.2f} tokens a pass")


if __name__ == "__main__":
    main()
