"""Kernels of a hybrid model's decode step: each op is a function over a plain JAX reference and GPU kernels."""

from pallas_kernels.causal_conv1d_update import ConvUpdate, causal_conv1d_update
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gated_delta_chunk import gated_delta_chunk
from pallas_kernels.gated_delta_update import gated_delta_update
from pallas_kernels.mamba1_state_update import mamba1_state_update
from pallas_kernels.recurrent.arguments import StateUpdate
from pallas_kernels.selective_state_update import fold_history, selective_state_update
from pallas_kernels.ssd_chunk_scan import ssd_chunk_scan
from pallas_kernels.state_commit import state_commit
from pallas_kernels.state_scatter import state_scatter

__all__ = [
    "ConvUpdate",
    "StateUpdate",
    "causal_conv1d_update",
    "decode_attention",
    "fold_history",
    "gated_delta_chunk",
    "gated_delta_update",
    "mamba1_state_update",
    "selective_state_update",
    "ssd_chunk_scan",
    "state_commit",
    "state_scatter",
]
