"""Mamba-2's recurrence over a prompt, chunk by chunk."""

from pallas_kernels.ssd_chunk_scan.api import ssd_chunk_scan

__all__ = ["ssd_chunk_scan"]
