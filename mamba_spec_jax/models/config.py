"""What a hybrid model is, as one frozen description that every family translates its checkpoints into."""

import dataclasses
import math

from mamba_spec_jax.cache.pools import PoolSpec
from mamba_spec_jax.modes import DTypePolicy

LAYER_TYPES = ("mamba", "attention")


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model of Mamba-2 and full-attention layers.

    Attributes:
        model_type: the family, as checkpoints name it.
        vocab_size: V.
        hidden_size: D.
        layer_types: "mamba" or "attention" for each layer.
        num_attention_heads, num_key_value_heads, head_dim: Hq, Hkv, Dh.
        attention_scale: multiplies the scores.
        attention_bias: whether the attention projections have biases.
        rope_theta: base of the rotary embedding, None for none.
        mamba_heads, mamba_head_dim, mamba_state, mamba_groups: H, P, N, G.
        mamba_conv_width: W.
        mamba_conv_bias, mamba_proj_bias: which biases exist.
        mamba_chunk_size: tokens a chunk of prefill.
        time_step_limit: clamp of the time step after softplus.
        shared_intermediate_size: width of the dense feed-forward part.
        num_experts, experts_per_token, expert_intermediate_size: routed experts beside it; 0 experts for none.
        norm_eps: of every norm.
        embedding_multiplier, residual_multiplier, logits_divisor: scales of embeddings, branches and logits.
        tie_embeddings: whether the embedding is the output projection too.
        eos_token_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_scale: float
    mamba_heads: int
    mamba_head_dim: int
    mamba_state: int
    mamba_groups: int
    mamba_conv_width: int
    shared_intermediate_size: int
    attention_bias: bool = False
    rope_theta: float | None = None
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_chunk_size: int = 256
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    norm_eps: float = 1e-6
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown or not self.layer_types:
            raise ValueError(f"layer_types has {unknown or 'no layers'}, expected each to be one of {LAYER_TYPES}")
        positive = [
            "vocab_size", "hidden_size", "mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups",
            "num_attention_heads", "num_key_value_heads", "head_dim", "shared_intermediate_size", "mamba_chunk_size",
        ]  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        for whole, part in (("num_attention_heads", "num_key_value_heads"), ("mamba_heads", "mamba_groups")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} is not a multiple of {part}={getattr(self, part)}")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even one for rotary embedding")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "attention")

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.mamba_inner + 2 * self.mamba_groups * self.mamba_state

    def pool_spec(self, policy: DTypePolicy) -> PoolSpec:
        """What a cache slot of this model holds."""
        return PoolSpec(
            recurrent_layers=len(self.layer_types) - len(self.attention_layers),
            heads=self.mamba_heads,
            head_dim=self.mamba_head_dim,
            state=self.mamba_state,
            conv_width=self.mamba_conv_width,
            conv_channels=self.conv_channels,
            attention_layers=len(self.attention_layers),
            kv_heads=self.num_key_value_heads,
            kv_head_dim=self.head_dim,
            ssm_dtype=policy.ssm,
            conv_dtype=policy.conv,
            kv_dtype=policy.kv,
        )
