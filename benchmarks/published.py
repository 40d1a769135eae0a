"""Published models as the byte model needs them: one recurrent layer, one convolution, full attention."""

from dataclasses import dataclass

from pallas_kernels.decode_attention.shapes import SHAPES as ATTENTION
from pallas_kernels.decode_attention.shapes import AttentionShape

GATE = 4  # bytes: dt, decays and beta are float32


@dataclass(frozen=True)
class Mamba2:
    """H, P, N, G. A ring keeps x, B and dt of a token; a pass also reads C, and writes y."""

    heads: int
    head_dim: int
    state: int
    groups: int
    op: str = "selective_state_update"

    @property
    def state_size(self) -> int:
        """Elements of one state."""
        return self.heads * self.head_dim * self.state

    def kept(self, itemsize: int) -> int:
        """Bytes of a token's inputs in the ring."""
        return (self.heads * self.head_dim + self.groups * self.state) * itemsize + GATE * self.heads

    def passing(self, itemsize: int) -> int:
        """Bytes of a token that are read or written once and not kept: C and y."""
        return (self.groups * self.state + self.heads * self.head_dim) * itemsize


@dataclass(frozen=True)
class GatedDelta:
    """Hk, Hv, V, K. A ring keeps k, raw v, g and beta of a token; a pass also reads q, and writes o."""

    key_heads: int
    heads: int
    value_dim: int
    key_dim: int
    op: str = "gated_delta_update"

    @property
    def state_size(self) -> int:
        """Elements of one state."""
        return self.heads * self.value_dim * self.key_dim

    def kept(self, itemsize: int) -> int:
        """Bytes of a token's inputs in the ring."""
        return (self.key_heads * self.key_dim + self.heads * self.value_dim) * itemsize + 2 * GATE * self.heads

    def passing(self, itemsize: int) -> int:
        """Bytes of a token that are read or written once and not kept: q and o."""
        return (self.key_heads * self.key_dim + self.heads * self.value_dim) * itemsize


@dataclass(frozen=True)
class Model:
    """One model: recurrent layers, what one of them is, C and W of its convolution, and its attention."""

    name: str
    layers: int
    recurrence: Mamba2 | GatedDelta
    channels: int
    attention: AttentionShape
    conv_width: int = 4


_SUPER = Mamba2(heads=128, head_dim=64, state=128, groups=8)
_NANO = Mamba2(heads=64, head_dim=64, state=128, groups=8)
_GRANITE = Mamba2(heads=128, head_dim=64, state=128, groups=1)
_FALCON = Mamba2(heads=32, head_dim=128, state=256, groups=2)
_QWEN = GatedDelta(key_heads=16, heads=32, value_dim=128, key_dim=128)

MODELS = tuple(
    Model(name, layers, recurrence, channels, ATTENTION[name])
    for name, layers, recurrence, channels in (
        ("nemotron-3-super", 40, _SUPER, 10240),
        ("nemotron-3-nano", 23, _NANO, 6144),
        ("qwen3-next", 36, _QWEN, 8192),
        ("qwen3.5-35b", 30, _QWEN, 8192),
        ("granite-4-h-small", 36, _GRANITE, 8448),
        ("falcon-h1-34b", 72, _FALCON, 5120),
    )
)
