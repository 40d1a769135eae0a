"""What a hybrid model is, as one frozen description that every family translates its checkpoints into."""

import dataclasses
import math

from mamba_spec_jax.attention.mamba2 import Mamba2
from mamba_spec_jax.attention.recurrence import Recurrence
from mamba_spec_jax.cache.pools import PoolSpec, RingSpec
from mamba_spec_jax.layers.mlp import ACTIVATIONS
from mamba_spec_jax.layers.routing import SigmoidRouting
from mamba_spec_jax.modes import CommitStrategy, DTypePolicy, ReplayRing, SpeculativeMode
from pallas_kernels.dispatch import Implementation

_ATTENDS = ("attention", "parallel", "shared")
_RECURS = ("mamba", "parallel", "shared")
LAYER_TYPES = ("mamba", "attention", "parallel", "shared", "mlp", "moe")
MAMBA_NORMS = ("gated", "before_gate", "none")


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
    """Transformer blocks that several layers use in turn, each with adapters of its own (Zamba2; Glorioso et al. 2024).

    Attributes:
        count: how many there are.
        adapter_rank: of each layer's low-rank addition to the block's feed-forward projection.
        adapts_attention: whether the projections to queries, keys and values have such additions too.
    """

    count: int
    adapter_rank: int
    adapts_attention: bool = False


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """A hybrid language model of Mamba-2, full-attention and feed-forward layers.

    Attributes:
        model_type: the family, as checkpoints name it.
        vocab_size: V.
        hidden_size: D.
        layer_types: what each layer is. Layers that mix tokens: "mamba", "attention", "parallel" (both on the same
            input, summed), "shared" ("mamba", which also hears one of `shared_blocks`). Layers that do not: "mlp" (a
            dense feed-forward part), "moe" (routed experts, and a dense part if it has a width).
        separate_feed_forward: layers that mix tokens have no feed-forward part; else each ends in a dense part, with
            experts beside it if there are any.
        num_attention_heads, num_key_value_heads, head_dim: Hq, Hkv, Dh.
        attention_scale: multiplies the scores.
        attention_bias: whether the attention projections have biases.
        rope_theta: base of the rotary embedding, None for none.
        rotary_dim: leading dims of a head that it rotates, None for all.
        mamba_heads, mamba_head_dim, mamba_state, mamba_groups: H, P, N, G.
        mamba_conv_width: W.
        mamba_conv_bias, mamba_proj_bias, mamba_out_bias: which of convolution, input and output projection have biases.
        mamba_chunk_size: tokens a chunk of prefill.
        mamba_norm: of Mamba-2's output y and gate z: "gated" norm(y silu(z)), "before_gate" norm(y) silu(z), "none".
        mamba_norm_eps: of that norm, None for `norm_eps`.
        time_step_limit: clamp of the time step after softplus, the same in every pass.
        shared_intermediate_size: width of the dense part beside experts, after a mixer or in a shared block.
        mlp_intermediate_size: width of "mlp" layers.
        mlp_activation, mlp_gated, mlp_bias: of every feed-forward part, experts included (which have no biases).
        num_experts, experts_per_token, expert_intermediate_size: routed experts; 0 experts for none.
        expert_latent_size: width of what the experts read and give, 0 for D.
        sigmoid_routing: how experts are scored, None for a softmax over the chosen ones.
        shared_blocks: for "shared" layers.
        norm_eps: of every norm.
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
    mamba_heads: int
    mamba_head_dim: int
    mamba_state: int
    mamba_groups: int
    mamba_conv_width: int
    separate_feed_forward: bool = False
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_scale: float = 1.0
    attention_bias: bool = False
    rope_theta: float | None = None
    rotary_dim: int | None = None
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_out_bias: bool = False
    mamba_chunk_size: int = 256
    mamba_norm: str = "gated"
    mamba_norm_eps: float | None = None
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    shared_intermediate_size: int = 0
    mlp_intermediate_size: int = 0
    mlp_activation: str = "silu"
    mlp_gated: bool = True
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    expert_latent_size: int = 0
    sigmoid_routing: SigmoidRouting | None = None
    shared_blocks: SharedBlocks | None = None
    norm_eps: float = 1e-6
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
        for name in self._sizes():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        multiples = [("mamba_heads", "mamba_groups")]
        if self.attention_layers:
            multiples.append(("num_attention_heads", "num_key_value_heads"))
        for whole, part in multiples:
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} is not a multiple of {part}={getattr(self, part)}")
        if self.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even one for rotary embedding")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim is {self.rotary_dim}, expected an even number up to head_dim={self.head_dim}")
        for name, choices in (("mlp_activation", tuple(ACTIVATIONS)), ("mamba_norm", MAMBA_NORMS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {choices}")
        if not self.time_step_limit[0] <= self.time_step_limit[1]:
            raise ValueError(f"time_step_limit is {self.time_step_limit}, expected two numbers in ascending order")
        if ("shared" in self.layer_types) != (self.shared_blocks is not None):
            raise ValueError(f"shared_blocks is {self.shared_blocks}, expected them if and only if a layer is shared")

    def _sizes(self) -> list[str]:
        """The sizes that this model needs to have."""
        names = ["vocab_size", "hidden_size", "mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"]
        names += ["mamba_chunk_size"]
        if self.attention_layers:
            names += ["num_attention_heads", "num_key_value_heads", "head_dim"]
        if "shared" in self.layer_types or not self.separate_feed_forward:
            names += ["shared_intermediate_size"]
        if "mlp" in self.layer_types:
            names += ["mlp_intermediate_size"]
        if "moe" in self.layer_types:
            names += ["num_experts"]
        return names

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Ids of the layers with keys and values."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in _ATTENDS)

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        """Ids of the layers with recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in _RECURS)

    def dense_width(self, layer_id: int) -> int:
        """Width of a layer's dense feed-forward part, 0 for none."""
        kind = self.layer_types[layer_id]
        if kind == "mlp":
            return self.mlp_intermediate_size
        return 0 if kind != "moe" and self.separate_feed_forward else self.shared_intermediate_size

    def has_experts(self, layer_id: int) -> bool:
        """Whether a layer routes tokens to experts."""
        kind = self.layer_types[layer_id]
        return kind == "moe" or (kind != "mlp" and not self.separate_feed_forward and self.num_experts > 0)

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        return self.mamba_inner + 2 * self.mamba_groups * self.mamba_state

    def recurrence(
        self,
        verify: SpeculativeMode = SpeculativeMode.DECODE,
        strategy: CommitStrategy = CommitStrategy.SNAPSHOT,
        replay: ReplayRing = ReplayRing(),  # noqa: B008, frozen
        implementation: Implementation | None = None,
    ) -> Recurrence:
        """The backend of the recurrent layers."""
        return Mamba2(
            heads=self.mamba_heads,
            head_dim=self.mamba_head_dim,
            state=self.mamba_state,
            groups=self.mamba_groups,
            conv_width=self.mamba_conv_width,
            chunk_size=self.mamba_chunk_size,
            dt_limits=self.time_step_limit,
            verify=verify,
            strategy=strategy,
            replay=replay,
            implementation=implementation,
        )

    def pool_spec(self, policy: DTypePolicy, ring: RingSpec | None = None) -> PoolSpec:
        """What a cache slot of this model holds."""
        return PoolSpec(
            recurrent_layers=len(self.mamba_layers),
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
            ring=ring,
        )
