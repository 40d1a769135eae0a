"""The static choices: which pass runs, which child verifies, how a commit gets its state, and in which dtypes."""

import dataclasses
import enum

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Device, target

_FLOAT32 = np.dtype(np.float32)


class ForwardMode(enum.Enum):
    """What one pass of the model is for; the backends route by it."""

    EXTEND = "extend"  # prompt tokens, chunk by chunk
    DECODE = "decode"  # one token a row
    IDLE = "idle"  # nothing to do: empty outputs, untouched cache
    TARGET_VERIFY = "target_verify"  # the root and its drafts; pools stay as they are until the commit
    DRAFT_EXTEND = "draft_extend"  # a drafter catching up with accepted tokens

    @property
    def defers_state(self) -> bool:
        """Whether the recurrent state is left to the commit."""
        return self in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)


class SpeculativeMode(enum.Enum):
    """Which child of a `HybridAttnBackend` runs TARGET_VERIFY."""

    DECODE = "decode"  # the step recurrence, bit-identical to decoding token by token
    PREFILL = "prefill"  # the chunked (SSD) form


class CommitStrategy(enum.Enum):
    """What a verify pass keeps so that the commit can reach the accepted prefix."""

    SNAPSHOT = "snapshot"  # a state per token; the commit scatters the winner into the pool
    REPLAY = "replay"  # the inputs, in a ring; the commit counts how many are accepted
    AUTO = "auto"  # whichever of them was measured to pay on this device for a batch, before anything is built


@dataclasses.dataclass(frozen=True)
class ReplayRing:
    """How much REPLAY's ring of inputs holds of a slot.

    A pass folds the ring into the state once the ring may lack room for the next pass. A longer ring folds less often,
    and every pass computes more tokens again.

    Attributes:
        length: Q, tokens it holds; at least two windows.
        window: the most tokens of one verify pass, root included.
    """

    length: int = 48
    window: int = 17

    def __post_init__(self):
        if self.window < 1 or self.length < 2 * self.window:
            raise ValueError(
                f"ReplayRing(length={self.length}, window={self.window}) is too short: it has to hold two windows, "
                f"expected a length of at least {2 * max(self.window, 1)}"
            )


@dataclasses.dataclass(frozen=True)
class DTypePolicy:
    """Which dtype each kind of array has.

    Attributes:
        params: weights.
        activations: hidden states and matrix products.
        conv: convolution windows in the pool.
        ssm: SSM states in the pool; the recurrence itself always computes in float32.
        kv: keys and values.
    """

    params: np.dtype = _FLOAT32
    activations: np.dtype = _FLOAT32
    conv: np.dtype = _FLOAT32
    ssm: np.dtype = _FLOAT32
    kv: np.dtype = _FLOAT32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            dtype = jnp.dtype(getattr(self, field.name))
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"DTypePolicy.{field.name} is {dtype}, expected a floating dtype")
            object.__setattr__(self, field.name, dtype)

    @classmethod
    def for_device(cls, device: Device | None = None) -> "DTypePolicy":
        """What suits a device: float32 on CPUs, float16 on NVIDIA GPUs before Ampere, bfloat16 elsewhere.

        Args:
            device: None is the one that a function called now runs on.
        """
        device = target() if device is None else device
        if device.platform == "cpu":
            return cls.float32()
        if device.capability is not None and device.capability < (8, 0):
            return cls.float16()
        return cls.bfloat16()

    @classmethod
    def float32(cls) -> "DTypePolicy":
        """Everything float32: CPUs, and wherever bits are compared."""
        return cls()

    @classmethod
    def float16(cls) -> "DTypePolicy":
        """float16 with float32 SSM states: GPUs before Ampere, which have no bfloat16."""
        half = jnp.dtype(jnp.float16)
        return cls(params=half, activations=half, conv=half, kv=half)

    @classmethod
    def bfloat16(cls) -> "DTypePolicy":
        """bfloat16 with float32 SSM states, as SGLang's defaults: Ampere and later."""
        half = jnp.dtype(jnp.bfloat16)
        return cls(params=half, activations=half, conv=half, kv=half)
