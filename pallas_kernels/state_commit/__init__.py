"""Brings recurrent state to the accepted node of a verify pass, in place."""

from pallas_kernels.state_commit.api import state_commit

__all__ = ["state_commit"]
