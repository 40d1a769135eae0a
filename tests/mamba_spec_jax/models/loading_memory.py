"""How much memory loading takes: a large checkpoint, and a process of its own that loads it and measures itself.

    python -m tests.mamba_spec_jax.models.loading_memory WARM_UP_FOLDER FOLDER DTYPE

prints JSON: bytes of the weights, and by how many the process grew at most. Linux only.
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mamba_spec_jax.loaded import load
from mamba_spec_jax.models.families import config_from_hf
from mamba_spec_jax.models.hybrid_lm import HybridModel
from mamba_spec_jax.modes import DTypePolicy
from tests.mamba_spec_jax.models.checkpoints import CONFIG, stored_shapes, write

REPOSITORY = Path(__file__).parents[3]
_PEAK_RESET = Path("/proc/self/clear_refs")


def can_measure() -> bool:
    """Whether this system lets a process ask for its own peak."""
    try:
        _PEAK_RESET.write_text("5")
    except OSError:
        return False
    return True


def write_large(folder: Path, hidden_size: int, layers: int, vocab_size: int, shards: int, dtype: Any) -> Path:
    """A checkpoint in which the embedding is the largest weight and experts take most of the room."""
    config = CONFIG | {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "layer_types": ["mamba", "attention"] * (layers // 2),
        "num_attention_heads": 4,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "num_local_experts": 8,
        "intermediate_size": hidden_size,
        "shared_intermediate_size": hidden_size,
        "tie_word_embeddings": True,
    }
    block = np.random.default_rng(0).normal(0, 0.02, 4096).astype(dtype)
    shapes = stored_shapes(HybridModel.create(config_from_hf(config)))
    return write(folder, config, {name: np.resize(block, shape) for name, shape in shapes.items()}, shards=shards)


def measure(warm_up: Path, folder: Path, dtype: str) -> dict[str, int]:
    """Loads `folder` in a process that has loaded `warm_up` before; bytes of its `weights`, and the `peak`."""
    command = [sys.executable, "-m", __name__, str(warm_up), str(folder), dtype]
    return json.loads(subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout)


def _status(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))


def main(warm_up: str, folder: str, dtype: str) -> None:
    policy = getattr(DTypePolicy, dtype)()
    load(warm_up, policy=policy)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or the peak would lie partly in what was freed before
    before = _status("VmRSS")
    _PEAK_RESET.write_text("5")
    loaded = load(folder, policy=policy)
    peak = _status("VmHWM") - before
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    print(json.dumps({"weights": weights, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
