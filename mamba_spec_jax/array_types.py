"""The legend of dimension letters, and aliases for the arrays that many signatures share.

B batch rows, T tokens in a verify (root and drafts), K drafts, L layers, S cache slots, H heads, P head dim, N state,
G groups, C convolution channels, W convolution width, V vocabulary, M cache length, Hkv key/value heads, Dh attention
head dim, D hidden size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int32, UInt32

Tokens = Int32[Array, "B T"]
Parents = Int32[Array, "B T"]
Ancestors = Bool[Array, "B T T"]
Rows = Int32[Array, "B"]
RowFlags = Bool[Array, "B"]
Seeds = UInt32[Array, "B"]
Hidden = Float[Array, "B T D"]
Logits = Float[Array, "B T V"]
SSMStates = Float[Array, "B H P N"]
SSMPool = Float[Array, "L S H P N"]
ConvPool = Float[Array, "L S W-1 C"]
KVBuffer = Float[Array, "S M Hkv Dh"]


def require_array(what: str, value: Any, shape: tuple[int | str, ...], kind: str = "int32") -> None:
    """Raises ValueError (while tracing) unless `value` is an array of this shape and kind of dtype.

    Args:
        what: begins the message: whose argument or result it is, such as "accept got logits".
        value: what came.
        shape: letters match any size, and are shown in the message.
        kind: the dtype for the message. "int32" takes any integer dtype, "float32" any floating one, "bool" itself.
    """
    expected = f"expected {kind}[{', '.join(map(str, shape))}]"
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"{what} of type {type(value).__name__}, {expected}")
    fits = len(value.shape) == len(shape) and all(
        isinstance(wanted, str) or wanted == size for size, wanted in zip(value.shape, shape, strict=True)
    )
    if not fits or not jnp.issubdtype(value.dtype, _KINDS[kind]):
        raise ValueError(f"{what} {value.dtype}{list(value.shape)}, {expected}")


_KINDS = {"int32": jnp.integer, "float32": jnp.floating, "bool": np.bool_}

__all__ = [
    "Ancestors",
    "Array",
    "Bool",
    "ConvPool",
    "Float",
    "Hidden",
    "Int32",
    "KVBuffer",
    "Logits",
    "Parents",
    "RowFlags",
    "Rows",
    "SSMPool",
    "SSMStates",
    "Seeds",
    "Tokens",
    "UInt32",
    "require_array",
]
