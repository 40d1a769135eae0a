"""Kernels of a hybrid model's decode step: each op is a function over a plain JAX reference and GPU kernels."""

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.state_commit import state_commit
from pallas_kernels.state_scatter import state_scatter

__all__ = ["decode_attention", "state_commit", "state_scatter"]
