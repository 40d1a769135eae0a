"""Softmax attention of a few new tokens over key and value buffers, read in place by slots and lengths."""

from pallas_kernels.decode_attention.api import decode_attention

__all__ = ["decode_attention"]
