"""What a draft head is, as one frozen description."""

import dataclasses

from mamba_spec_jax.layers.rotary_scaling import RotaryScaling

LAYER_TYPES = ("full_attention", "sliding_attention")


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
        rope_theta: base of the rotary embedding, None for none.
        rotary_dim: leading dims of a head that it rotates, None for all.
        rope_scaling: gives it other frequencies; of a kind that does not depend on the length of the text.
        layer_types: what each layer attends to, all of the text or a sliding window; empty where all attend to all.
        sliding_window: how many positions layers with a sliding window see, a token's own included.
        is_causal: whether a token of a block that is filled at once sees those after it; None where layers with a
            sliding window are causal and the others are not. Heads that fill no blocks are always causal.
        norm_before_residual: whether the residual stream of EAGLE-3's layer begins with the normed hidden state.
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
    rope_theta: float | None = 10_000.0
    rotary_dim: int | None = None
    rope_scaling: RotaryScaling | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    norm_before_residual: bool = False
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
        if self.layer_types and (len(self.layer_types) != self.num_layers or set(self.layer_types) - set(LAYER_TYPES)):
            raise ValueError(f"layer_types is {self.layer_types}, expected {self.num_layers} of {LAYER_TYPES}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}, expected at least 1")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError(
                f"sliding_window is None, expected a number of positions for layer_types {self.layer_types}"
            )
        dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if self.rope_theta is not None and (dim % 2 or not 0 < dim <= self.head_dim):
            raise ValueError(f"{dim} dims are rotated, expected an even number up to head_dim={self.head_dim}")
        if self.rope_theta is not None and self.rope_scaling is not None:
            self.rope_scaling.check(self.rope_theta, dim)
            if self.rope_scaling.by_length:
                raise ValueError(
                    f"rope_scaling is of the rope type {self.rope_scaling.rope_type}, whose frequencies depend on the "
                    "length of the text: expected one of default, linear, yarn, llama3, proportional in a draft head"
                )

    def window(self, layer: int) -> int | None:
        """How many positions a layer sees, None for all."""
        return self.sliding_window if self._slides(layer) else None

    def fills_causally(self, layer: int) -> bool:
        """Whether a layer hides the later tokens of a block from the earlier ones."""
        return self._slides(layer) if self.is_causal is None else self.is_causal

    def _slides(self, layer: int) -> bool:
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
