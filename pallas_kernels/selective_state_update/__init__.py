"""Mamba-2's recurrence over a pool of states: decode, verify, and replay of a history."""

from pallas_kernels.selective_state_update.api import fold_history, selective_state_update
from pallas_kernels.selective_state_update.arguments import StateUpdate

__all__ = ["StateUpdate", "fold_history", "selective_state_update"]
