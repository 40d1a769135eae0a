"""Writes chosen states of a verify pass into a pool of slots."""

from pallas_kernels.state_scatter.api import state_scatter

__all__ = ["state_scatter"]
