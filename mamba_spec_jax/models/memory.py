"""How much memory a model, its cache and a verify pass take, by part, before any of it is allocated."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

import jax

from mamba_spec_jax.attention.full import FullAttention
from mamba_spec_jax.models.config import HybridConfig
from mamba_spec_jax.models.network import abstract_split
from mamba_spec_jax.models.strategy import choose_strategy
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ReplayRing


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part.

    Attributes:
        parts: name to bytes. Resident: weights, SSM pool, convolution pool, REPLAY's ring, keys and values. For one
            verify pass: SNAPSHOT's states, convolution inputs, logits, and one block of attention.
    """

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def plan_memory(
    config: HybridConfig,
    batch: int,
    max_len: int,
    num_tokens: int,
    strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
    policy: DTypePolicy | None = None,
    replay: ReplayRing = ReplayRing(),  # noqa: B008, frozen
) -> MemoryPlan:
    """What `batch` rows of `max_len` tokens need, verifying T = `num_tokens` at a time; allocates nothing.

    Args:
        config: the model.
        batch: B, rows and cache slots.
        max_len: M, tokens a slot has room for.
        num_tokens: T, root and drafts.
        strategy: what a verify pass keeps for the commit.
        policy: dtypes; None is all float32.
        replay: how much the ring of REPLAY holds.
    """
    for name, value in (("batch", batch), ("max_len", max_len), ("num_tokens", num_tokens)):
        if value < 1:
            raise ValueError(f"plan_memory got {name}={value}, expected at least 1")
    if strategy is CommitStrategy.AUTO:
        strategy = choose_strategy(batch, num_tokens).strategy
    policy = policy or DTypePolicy()
    spec = config.pool_spec(policy, config.recurrent.backend(strategy=strategy, replay=replay))
    L, rows = spec.recurrent_layers, batch * num_tokens
    _, weights = abstract_split(config, policy)
    block = min(FullAttention.block, max_len)
    gathered = 2 * batch * block * spec.kv_heads * spec.kv_head_dim * policy.kv.itemsize
    scores = 2 * rows * config.num_attention_heads * block * 4
    parts = {
        "weights": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)),
        "SSM pool": spec.ssm_bytes(batch),
        "convolution pool": spec.conv_bytes(batch),
        "replay ring": spec.ring_bytes(batch),
        "keys and values": spec.kv_bytes(batch, max_len),
        "verify: a state per token": rows * spec.ssm_bytes() if spec.ring is None else 0,
        "verify: convolution inputs": L * rows * spec.conv_channels * policy.conv.itemsize,
        "verify: logits": rows * config.vocab_size * 4,
        "verify: one attention block": gathered + scores if spec.attention_layers else 0,
    }
    return MemoryPlan(MappingProxyType(parts))
