"""More of tests/pallas_kernels/test_selective_state_update.py than a commit can wait for: all combinations.

Not collected by default: `pytest tests/sweeps`.
"""

import itertools

import pytest

from tests.pallas_kernels.test_selective_state_update import DTYPES, FORMS, KEPT, RUNS, check


@pytest.mark.parametrize(("state_dtype", "dtype"), itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize(("keep", "tree"), KEPT)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_every_combination(run, form, keep, tree, state_dtype, dtype):
    check(run, form, keep, tree, state_dtype, dtype)
