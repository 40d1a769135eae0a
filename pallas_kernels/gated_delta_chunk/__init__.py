"""The gated delta rule (GDN and KDA) over prompts, in chunks."""

from pallas_kernels.gated_delta_chunk.api import gated_delta_chunk

__all__ = ["gated_delta_chunk"]
