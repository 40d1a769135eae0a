"""What a draft head is, as one frozen description."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """A draft head of transformer layers on the hidden states of a target.

    Attributes:
        hidden_size: D, the target's too.
        intermediate_size: width of the feed-forward part.
        num_attention_heads, num_key_value_heads, head_dim: Hq, Hkv, Dh.
        vocab_size: V of the target.
        target_layers: layers of the target whose outputs are read.
        num_layers: layers of the head.
        draft_vocab_size: tokens that the head can propose; None for all of the target's.
        rope_theta: base of the rotary embedding.
        norm_eps: of every norm.
        embedding_multiplier, logits_divisor: the target's scales of embeddings and logits.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layers: tuple[int, ...]
    num_layers: int = 1
    draft_vocab_size: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    embedding_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self):
        for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "num_layers", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}.{name} is {getattr(self, name)}, expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if not self.target_layers:
            raise ValueError(f"{type(self).__name__}.target_layers is empty, expected at least one layer of the target")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}, expected 1..{self.vocab_size} (vocab_size)")
