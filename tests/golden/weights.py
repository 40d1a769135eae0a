"""Weights of the families' tiny models by rule, so that only what comes of them is stored. NumPy alone."""

import hashlib
import zlib

import numpy as np

# Norms that multiply by one plus their weight, and of their families the one that does not.
ZERO_CENTERED, NOT_CENTERED = ("qwen3_next", "qwen3_5"), "linear_attn.norm"


def draw_all(
    shapes: dict[str, tuple[int, ...]], seed: int, trained_dt: bool, family: str = ""
) -> dict[str, np.ndarray]:
    """Every weight, by its name in the file; none depends on which others there are."""
    weights = {name: _draw(name, tuple(shape), seed, trained_dt) for name, shape in shapes.items()}
    if family.startswith(ZERO_CENTERED):
        for name, value in weights.items():
            if "norm" in name and NOT_CENTERED not in name:
                weights[name] = value - np.float32(1)
    return weights


def digest(weights: dict[str, np.ndarray]) -> str:
    """Tells whether the rule still gives the numbers that a golden was made with."""
    return hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()


def _draw(name: str, shape: tuple[int, ...], seed: int, trained_dt: bool) -> np.ndarray:
    """Activations stay of order one, and no weight has a value that would hide a mistake."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("A_log"):
        value = np.log(rng.uniform(1, 16, shape))
    elif name.endswith("dt_bias"):
        value = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-2), np.log(0.5), shape))))
        if trained_dt:  # as in trained models, whose smallest time steps are about 1e-4
            value = rng.uniform(-9, 1, shape)
            value[0] = -9
    elif name.endswith(".D"):
        value = rng.normal(0.8, 0.3, shape)
    elif "norm" in name:
        value = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("bias"):
        value = rng.normal(0, 0.3, shape)
    else:
        value = rng.normal(0, shape[-1] ** -0.5, shape)
    return value.astype(np.float32)
