"""More of tests/pallas_kernels/test_state_commit.py than a commit can wait for: every W, dtype and kind of tree.

Not collected by default: `pytest tests/sweeps`.
"""

import itertools

import pytest

from tests.pallas_kernels.oracle import DTYPES
from tests.pallas_kernels.runs import EXAMPLES, every_run
from tests.pallas_kernels.test_state_commit import Case, check_against_definition

KINDS = list(itertools.product((2, 3, 4, 5), DTYPES, (False, True), (False, True)))


@every_run
@pytest.mark.parametrize(("width", "dtype", "tree", "tracked"), KINDS)
def test_every_width_dtype_and_tree(run, width, dtype, tree, tracked):
    case = Case(2, 9, 5, 6, 4, width, 133, (3, 43), dtype, dtype, tree, tracked)
    check_against_definition(run, case, 4 * EXAMPLES[run])
