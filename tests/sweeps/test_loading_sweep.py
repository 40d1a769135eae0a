"""Loading two gigabytes takes little more memory than the weights do.

Not collected by default: `pytest tests/sweeps`. Needs 3 GB of disk and of memory.
"""

import ml_dtypes
import numpy as np
import pytest

from tests.mamba_spec_jax.models.checkpoints import CONFIG, random_weights, write
from tests.mamba_spec_jax.models.loading_memory import measure, write_large


@pytest.mark.parametrize(("dtype", "layers"), [(ml_dtypes.bfloat16, 30), (np.float32, 16)])
def test_two_gigabytes(tmp_path, dtype, layers):
    warm_up = write(tmp_path / "small", CONFIG, random_weights(CONFIG))
    folder = write_large(tmp_path / "large", 1024, layers=layers, vocab_size=50_000, shards=4, dtype=dtype)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    measured = measure(warm_up, folder, "bfloat16")
    ratio = measured["peak"] / measured["weights"]
    print(f"{stored / 1e9:.2f} GB stored, {measured['weights'] / 1e9:.2f} GB loaded, peak {ratio:.3f} of that")
    assert stored > 2e9
    assert 0.95 < ratio < 1.2
