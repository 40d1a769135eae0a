"""The gated delta rule (GDN and KDA) over a few tokens of many rows: decoding, verifying, folding a ring."""

from pallas_kernels.gated_delta_update.api import fold_history, gated_delta_update
from pallas_kernels.gated_delta_update.recurrence import gates

__all__ = ["fold_history", "gated_delta_update", "gates"]
