"""The legend of dimension letters, and aliases for the arrays that many signatures share.

B batch rows, T tokens in a verify (root and drafts), K drafts, L layers, S cache slots, H heads, P head dim, N state,
G groups, C convolution channels, W convolution width, V vocabulary, M cache length, Hkv key/value heads, Dh attention
head dim, D hidden size.
"""

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
]
