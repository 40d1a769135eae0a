"""Mamba's depthwise causal convolution over a pool of windows: prompts, decode, and verify."""

from pallas_kernels.causal_conv1d_update.api import ConvUpdate, causal_conv1d_update

__all__ = ["ConvUpdate", "causal_conv1d_update"]
