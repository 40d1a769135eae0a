"""One source of drafts where another has none."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mamba_spec_jax.array_types import Array, Parents, Rows, Tokens
from mamba_spec_jax.speculative.drafts import propose
from mamba_spec_jax.speculative.protocol import Drafter, Progress, Proposal
from mamba_spec_jax.speculative.sampling import Greedy, TokenChoice


@dataclasses.dataclass(frozen=True)
class FallbackDrafter:
    """Proposes what `first` does, and what `second` does in rows for which `first` has nothing to say.

    Both propose in every step and both follow the target, whosever drafts were verified. If either proposes trees, the
    other's chains are proposed as trees.

    One drafter may return probs while the other chooses its drafts outright. Those of a row are then one-hot
    rows of probs, which is rejection sampling with a point mass, and exact, but only as long as the choice is
    independent of the noise that accepts and corrects it. So the one that chooses outright is asked to choose greedily,
    not with the target's noise. Siblings have no such probs, since a point mass holds but one of them; a tree is
    refused.

    `params` are `(first's, second's)`, or None if neither has weights; so is the state.

    Attributes:
        first: asked first, such as an `NgramDrafter`.
        second: its drafts are taken where the first has none.
    """

    first: Drafter
    second: Drafter

    @property
    def max_drafts(self) -> int:
        """K, the most tokens that both can propose."""
        return min(drafter.max_drafts for drafter in self._both)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers that either reads, the first's before the second's, each once."""
        return tuple(dict.fromkeys(self.first.hidden_layers + self.second.hidden_layers))

    @property
    def proposes_trees(self) -> bool:
        return any(drafter.proposes_trees for drafter in self._both)

    @property
    def vocab_size(self) -> int | None:
        """The smaller of the two, each of which has to hold all of the target's; None if neither has one."""
        return min((size for size in map(_vocab_size, self._both) if size is not None), default=None)

    def init(self, batch: int, max_len: int) -> tuple[Any, Any]:
        """Both states, empty."""
        return self.first.init(batch, max_len), self.second.init(batch, max_len)

    def propose(
        self, params: Any, state: tuple[Any, Any], tokens: Tokens, lengths: Rows, choose: TokenChoice, num_drafts: int
    ) -> Proposal:
        """Proposes row by row what the first has to say, else what the second has; arguments as `Drafter.propose`'s."""

        def ask(index: int, choose: TokenChoice) -> Proposal:
            drafter = self._both[index]
            return propose(drafter, _pair(params)[index], state[index], tokens, lengths, choose, num_drafts)

        proposals = [ask(0, choose), ask(1, choose)]
        probs = [proposal.probs for proposal in proposals if proposal.probs is not None]
        if len(probs) == 1:
            outright = 0 if proposals[0].probs is None else 1
            if self.proposes_trees:
                raise ValueError(
                    f"{type(self._both[1 - outright]).__name__} proposes with probs and "
                    f"{type(self._both[outright]).__name__} without, expected both or neither: siblings of a tree that "
                    "were chosen outright have none"
                )
            greedily = ask(outright, dataclasses.replace(choose, method=Greedy()))
            masses = jax.nn.one_hot(greedily.tokens, probs[0].shape[-1], dtype=jnp.float32)
            proposals[outright] = dataclasses.replace(greedily, probs=masses)
        first, second = proposals
        taken = first.counts > 0

        def select(mine: Array, other: Array) -> Array:
            return jnp.where(taken.reshape(-1, *[1] * (mine.ndim - 1)), mine, other)

        return Proposal(
            tokens=select(first.tokens, second.tokens),
            counts=select(first.counts, second.counts),
            state=(first.state, second.state),
            probs=None if first.probs is None or second.probs is None else select(first.probs, second.probs),
            parents=select(*map(_as_tree, proposals)) if self.proposes_trees else None,
        )

    def update(self, params: Any, state: tuple[Any, Any], progress: Progress) -> tuple[Any, Any]:
        """Both follow, each with the hidden states that it reads."""
        layers = self.hidden_layers

        def follow(drafter: Drafter, params: Any, state: Any) -> Any:
            hidden = tuple(progress.hidden[layers.index(layer)] for layer in drafter.hidden_layers)
            return drafter.update(params, state, dataclasses.replace(progress, hidden=hidden, as_proposed=False))

        first, second = (follow(*one) for one in zip(self._both, _pair(params), state, strict=True))
        return first, second

    @property
    def _both(self) -> tuple[Drafter, Drafter]:
        return self.first, self.second


def _pair(params: Any) -> tuple[Any, Any]:
    if params is None:
        return None, None
    if not isinstance(params, tuple) or len(params) != 2:
        raise ValueError(f"FallbackDrafter got params of type {type(params).__name__}, expected (first's, second's)")
    return params


def _vocab_size(drafter: Drafter) -> int | None:
    return getattr(drafter, "vocab_size", None)


def _as_tree(proposal: Proposal) -> Parents:
    B, K = proposal.tokens.shape
    if proposal.parents is None:
        return jnp.broadcast_to(jnp.arange(-1, K, dtype=jnp.int32), (B, K + 1))
    return jnp.asarray(proposal.parents, jnp.int32)
