"""What a hybrid model is, as one frozen description that every family translates its checkpoints into."""

import dataclasses

from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import PoolSpec
from mamba_spec_jax.layers.mlp import ACTIVATIONS
from mamba_spec_jax.layers.rotary_scaling import RotaryScaling
from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.models.recurrent_config import (
    GatedDeltaConfig,
    Mamba1Config,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
    require_multiple,
    require_positive,
)
from mamba_spec_jax.modes import DTypePolicy

_ATTENDS = ("attention", "parallel", "shared")
# The layers with recurrent state, and what describes it.
_RECURS = {
    "mamba": Mamba2Config,
    "parallel": Mamba2Config,
    "shared": Mamba2Config,
    "gated_delta": GatedDeltaConfig,
    "mamba1": Mamba1Config,
    "short_conv": ShortConvConfig,
}
LAYER_TYPES = ("mamba", "attention", "parallel", "shared", "mlp", "moe", "gated_delta", "mamba1", "short_conv")
ATTENTION_NORMS = ("none", "head", "all")


@dataclasses.dataclass(frozen=True)
class BranchMultipliers:
    """Scales inside the branches of a layer (Falcon-H1; Zuo et al. 2025).

    Attributes:
        attention_in, attention_out: of what attention reads and gives.
        ssm_in, ssm_out: of what Mamba-2 reads and gives.
        ssm: of its projections z, x, B, C and dt.
        mlp_gate, mlp_out: of a dense feed-forward part's gate and of what it gives.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    mlp_gate: float = 1.0
    mlp_out: float = 1.0


@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """Transformer blocks that several layers use in turn, each with its own adapters (Zamba2; Glorioso et al. 2024).

    Attributes:
        count: how many there are.
        adapter_rank: of each layer's low-rank addition to the block's feed-forward projection.
        adapts_attention: whether the projections to queries, keys and values have such additions too.
    """

    count: int
    adapter_rank: int
    adapts_attention: bool = False


@dataclasses.dataclass(frozen=True)
class LatentDims:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    Attributes:
        rank: of the latent that keys and values are projected from.
        shared: dims of a key that all heads share, beside the latent.
        key, value: dims of a head's key and value that come of the latent.
        query_rank: of the latent that queries are projected from, 0 for none.
    """

    rank: int
    shared: int
    key: int
    value: int
    query_rank: int = 0


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model of recurrent, full-attention and feed-forward layers.

    Attributes:
        model_type: the family, as checkpoints name it.
        vocab_size: V.
        hidden_size: D.
        layer_types: what each layer is. Layers that mix tokens: "mamba", "gated_delta", "mamba1", "short_conv",
            "attention", "parallel" ("mamba" and "attention" on the same input, summed), "shared" ("mamba" and one of
            `shared_blocks`). Layers that do not: "mlp" (a dense feed-forward part), "moe" (routed experts, and a dense
            part if it has a width).
        separate_feed_forward: layers that mix tokens have no feed-forward part; else each ends in a dense part, with
            experts beside it if there are any.
        num_attention_heads, num_key_value_heads, head_dim: Hq, Hkv, Dh.
        attention_scale: multiplies the scores.
        attention_bias: whether the attention projections have biases.
        attention_gated: whether sigmoids of further queries gate what the heads give.
        attention_norm: of queries and keys: "head" by head, "all" heads together, "none".
        attention_norms_output: whether the branches of attention layers are normed at their ends, not their beginnings.
        latent: of latent attention, whose heads read one key: Hkv is 1, Dh its rank and shared dims. None for none.
        rope_theta: base of the rotary embedding, None for none.
        rotary_dim: leading dims of a head that it rotates, None for all.
        rope_scaling: gives it other frequencies, for longer texts; None for none.
        recurrent: what its recurrent layers are.
        shared_intermediate_size: width of the dense part beside experts, after a mixer or in a shared block.
        shared_gated: whether a sigmoid gates, token by token, the dense part beside experts.
        dense_layers: ids of layers that mix tokens whose feed-forward part is without experts and as wide as an "mlp".
        mlp_intermediate_size: width of "mlp" layers and `dense_layers`.
        mlp_activation, mlp_gated, mlp_bias: of every feed-forward part, experts included (which have no biases).
        num_experts, experts_per_token, expert_intermediate_size: routed experts; 0 experts for none.
        expert_latent_size: width of what the experts read and give, 0 for D.
        sigmoid_routing: how experts are scored, None for a softmax.
        softmax_over_chosen: whether that softmax is over the chosen experts, so that their weights sum to one, or all.
        shared_blocks: for "shared" layers.
        norm_eps: of every norm.
        zero_centered_norms: whether norms of layers, queries and keys multiply by one plus their weight.
        embedding_multiplier, residual_multiplier, logits_divisor: scales of embeddings, branches and logits.
        multipliers: further scales inside the branches.
        residual_in_fp32: whether layers are summed in float32, whatever the activations' dtype.
        tie_embeddings: whether the embedding is the output projection too.
        eos_token_ids: tokens that end a text.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    recurrent: RecurrentConfig
    separate_feed_forward: bool = False
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_scale: float = 1.0
    attention_bias: bool = False
    attention_gated: bool = False
    attention_norm: str = "none"
    attention_norms_output: bool = False
    latent: LatentDims | None = None
    rope_theta: float | None = None
    rotary_dim: int | None = None
    rope_scaling: RotaryScaling | None = None
    shared_intermediate_size: int = 0
    shared_gated: bool = False
    dense_layers: tuple[int, ...] = ()
    mlp_intermediate_size: int = 0
    mlp_activation: str = "silu"
    mlp_gated: bool = True
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_latent_size: int = 0
    sigmoid_routing: SigmoidRouting | None = None
    softmax_over_chosen: bool = True
    shared_blocks: SharedBlocks | None = None
    norm_eps: float = 1e-6
    zero_centered_norms: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    multipliers: BranchMultipliers = BranchMultipliers()
    residual_in_fp32: bool = False
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown or not self.layer_types:
            raise ValueError(f"layer_types has {unknown or 'no layers'}, expected each to be one of {LAYER_TYPES}")
        require_positive(self, *self._sizes())
        if self.attention_layers:
            require_multiple(self, "num_attention_heads", "num_key_value_heads")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even one for rotary embedding")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim is {self.rotary_dim}, expected an even number up to head_dim={self.head_dim}")
        if self.rope_theta is not None and self.rope_scaling is not None:
            self.rope_scaling.check(self.rope_theta, self.rotary_dim or self.head_dim)
        if self.mlp_activation not in ACTIVATIONS:
            raise ValueError(f"mlp_activation is {self.mlp_activation!r}, expected one of {tuple(ACTIVATIONS)}")
        if self.latent and (self.num_key_value_heads, self.head_dim) != (1, self.latent.rank + self.latent.shared):
            raise ValueError(
                f"num_key_value_heads and head_dim are {self.num_key_value_heads} and {self.head_dim}, expected 1 and "
                f"{self.latent.rank + self.latent.shared} for {self.latent}"
            )
        if self.attention_norm not in ATTENTION_NORMS:
            raise ValueError(f"attention_norm is {self.attention_norm!r}, expected one of {ATTENTION_NORMS}")
        for kind in (self.layer_types[i] for i in self.recurrent_layers):
            if not isinstance(self.recurrent, _RECURS[kind]):
                raise ValueError(
                    f"recurrent is a {type(self.recurrent).__name__}, expected a {_RECURS[kind].__name__} for layers "
                    f"of type {kind!r}"
                )
        if self.num_experts and self.sigmoid_routing is not None:
            self.sigmoid_routing.check(self.num_experts, self.experts_per_token)
        if ("shared" in self.layer_types) != (self.shared_blocks is not None):
            raise ValueError(f"shared_blocks is {self.shared_blocks}, expected them if and only if a layer is shared")

    def _sizes(self) -> list[str]:
        """The sizes that this model needs to have."""
        names = ["vocab_size", "hidden_size"]
        if self.attention_layers:
            names += ["num_attention_heads", "num_key_value_heads", "head_dim"]
        if "shared" in self.layer_types or not (self.separate_feed_forward or self.num_experts):
            names += ["shared_intermediate_size"]
        if "mlp" in self.layer_types or self.dense_layers:
            names += ["mlp_intermediate_size"]
        if "moe" in self.layer_types:
            names += ["num_experts"]
        return names

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Ids of the layers with keys and values."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in _ATTENDS)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Ids of the layers with recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in _RECURS)

    def dense_width(self, layer_id: int) -> int:
        """Width of a layer's dense feed-forward part, 0 for none."""
        kind = self.layer_types[layer_id]
        if kind == "mlp" or layer_id in self.dense_layers:
            return self.mlp_intermediate_size
        return 0 if kind != "moe" and self.separate_feed_forward else self.shared_intermediate_size

    def has_experts(self, layer_id: int) -> bool:
        """Whether a layer routes tokens to experts."""
        kind = self.layer_types[layer_id]
        if kind in ("moe", "mlp"):
            return kind == "moe"
        return not self.separate_feed_forward and self.num_experts > 0 and layer_id not in self.dense_layers

    def pool_spec(self, policy: DTypePolicy, recurrence: Recurrence | None = None) -> PoolSpec:
        """What a cache slot of this model holds for a backend of its recurrent layers, by default SNAPSHOT's."""
        recurrence = recurrence or self.recurrent.backend()
        return PoolSpec(
            recurrent_layers=len(self.recurrent_layers),
            heads=recurrence.heads,
            head_dim=recurrence.head_dim,
            state=recurrence.state,
            conv_width=recurrence.conv_width,
            conv_channels=recurrence.conv_channels,
            attention_layers=len(self.attention_layers),
            kv_heads=self.num_key_value_heads,
            kv_head_dim=self.head_dim,
            ssm_dtype=policy.ssm,
            conv_dtype=policy.conv,
            kv_dtype=policy.kv,
            ring=recurrence.ring_spec(policy.activations),
        )
