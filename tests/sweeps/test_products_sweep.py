"""Products of verify passes and draft heads with the numbers of rows that the default run leaves out.

Not collected by default: `pytest tests/sweeps`.
"""

import pytest

from tests.mamba_spec_jax.models.test_products import products  # noqa: F401, a fixture
from tests.mamba_spec_jax.products import MORE_ROWS, depend_on_place


@pytest.mark.parametrize("rows", MORE_ROWS)
def test_tokens_keep_their_bits_wherever_they_stand(products, rows):  # noqa: F811
    assert depend_on_place(products, rows) == []
