"""The gated delta rule (GDN and KDA) over a few tokens of many rows: decoding, verifying, folding a ring."""

from pallas_kernels.gated_delta_update.api import gated_delta_update
from pallas_kernels.gated_delta_update.recurrence import Tokens, advance, fold, gates, prepared
from pallas_kernels.gated_delta_update.reference import Updated

__all__ = ["Tokens", "Updated", "advance", "fold", "gated_delta_update", "gates", "prepared"]
