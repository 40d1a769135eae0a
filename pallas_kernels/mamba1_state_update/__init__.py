"""Mamba-1's recurrence over a pool of states: decode, verify, and replay."""

from pallas_kernels.mamba1_state_update.api import mamba1_state_update

__all__ = ["mamba1_state_update"]
