"""What `validate=True` reports of a commit: rows that would keep their state without having been told to."""

import jax
import numpy as np

from mamba_spec_jax.array_types import Rows
from mamba_spec_jax.cache.records import VerifyRecord


def check_commit(record: VerifyRecord, held: Rows, nodes: dict[str, Rows]) -> None:
    """Raises a ValueError that names every row whose node cannot be committed; for eager calls only.

    Args:
        record: of the verify pass.
        held: `[B]` tokens that each row's slot holds now.
        nodes: by argument, `[B]` the nodes to be kept; -1 for none.
    """
    arrays = (record.slots, record.num_tokens, record.held, held, *nodes.values())
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        raise ValueError(
            "update_mamba_state_after_mtp_verify: validate=True reads values, so it cannot run inside jit; call it "
            "eagerly or drop it"
        )
    slots, num_tokens, before, now = (np.asarray(array) for array in arrays[:4])
    problems = [
        f"row {b}: slot {slots[b]} held {before[b]} tokens when the record was made and holds {now[b]} now: the record "
        "was committed before, or is of an earlier pass"
        for b in np.flatnonzero((slots >= 0) & (before != now))
    ]
    for name, values in zip(nodes, map(np.asarray, nodes.values()), strict=True):
        problems += [
            f"{name}[{b}] is {values[b]}, but row {b} has nodes 0..{num_tokens[b] - 1} (its slot had room for no more, "
            "or it had no more drafts), and -1 for none"
            for b in np.flatnonzero((slots >= 0) & ((values < -1) | (values >= num_tokens)))
        ]
    if problems:
        raise ValueError("update_mamba_state_after_mtp_verify: " + "; ".join(problems))
