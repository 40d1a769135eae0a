"""Mamba-1's recurrence over a pool of states: decode, verify, and replay of a history."""

from pallas_kernels.mamba1_state_update.api import fold_history, mamba1_state_update

__all__ = ["fold_history", "mamba1_state_update"]
