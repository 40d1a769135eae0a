"""What a call says of its rows, one value for all of them or one for each: checked on the host."""

import numbers
from typing import Any

import numpy as np

MOST = 2**30  # positions are below it: see `draw_keys`
_MOST_SEED = 2**32 - 1


def per_row(name: str, value: Any, batch: int, dtype: Any, least: float, most: float | None = None) -> np.ndarray:
    """`[B]` of `dtype`; ValueError, which names the option, for what are not `batch` finite numbers `least`..`most`.

    The greatest integer is 2**30 unless `most` says otherwise.
    """
    kind, integers = ("an integer", True) if np.issubdtype(dtype, np.integer) else ("a number", False)
    try:
        rows = np.asarray(value)
    except ValueError:  # lists of different lengths
        rows = np.asarray(None)
    if rows.ndim > 1 or (rows.ndim == 1 and len(rows) != batch):
        raise ValueError(f"{name} has shape {list(rows.shape)}, expected one value or {batch}, one a prompt")
    if not np.issubdtype(rows.dtype, np.integer if integers else np.number) or np.iscomplexobj(rows):
        raise ValueError(f"{name} is {value!r}, expected {kind} or {batch} of them, one a prompt")
    if not np.all(np.isfinite(rows)) or np.any(rows < least):
        raise ValueError(f"{name} is {value!r}, expected finite values of at least {least}")
    most = MOST if most is None and integers else most
    if most is not None and np.any(rows > most):
        raise ValueError(f"{name} is {value!r}, expected at most {most}")
    return np.broadcast_to(rows, (batch,)).astype(dtype)


def seed_rows(seeds: Any, batch: int) -> np.ndarray:
    """`[B]` uint32; a single seed is counted up from row to row."""
    rows = np.asarray(seeds, object).reshape(-1).tolist() if np.ndim(seeds) else [seeds] * batch
    if len(rows) != batch or not all(
        isinstance(seed, numbers.Integral) and not isinstance(seed, bool) for seed in rows
    ):
        raise ValueError(f"seeds is {seeds!r}, expected an integer or {batch} of them, one a prompt")
    counted = [int(seed) + (0 if np.ndim(seeds) else row) for row, seed in enumerate(rows)]
    if min(counted) < 0 or max(counted) > _MOST_SEED:
        last = f" (counted up to {counted[-1]} in {batch} rows)" if batch > 1 and not np.ndim(seeds) else ""
        raise ValueError(f"seeds is {seeds!r}{last}, expected 0..{_MOST_SEED}")
    return np.asarray(counted, np.uint32)


def is_integer(value: Any) -> bool:
    """Whether it is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
