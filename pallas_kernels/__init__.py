"""Kernels that move recurrent state: each op has a plain JAX reference and GPU implementations behind one function."""

from pallas_kernels.state_commit import state_commit
from pallas_kernels.state_scatter import state_scatter

__all__ = ["state_commit", "state_scatter"]
