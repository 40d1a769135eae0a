"""Mamba-2's recurrence over a pool of states: decode, verify, and replay of a history."""

from pallas_kernels.recurrent.arguments import StateUpdate
from pallas_kernels.selective_state_update.api import fold_history, selective_state_update

__all__ = ["StateUpdate", "fold_history", "selective_state_update"]
