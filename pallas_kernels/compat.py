"""The one place for differences between jax versions.

Every other module takes `triton`, `mosaic_gpu` and what interprets them from here. Either backend is None where this
jax does not have it.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

triton: Any
mosaic_gpu: Any

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

try:
    from jax.experimental.pallas import mosaic_gpu
except ImportError:
    mosaic_gpu = None

# Since 0.11 lowering a Triton kernel warns that the backend will go. Lowering happens in the caller's jit, out of reach
# of a context manager here; `dispatch` already moves to Mosaic GPU where Triton is missing.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)

JAX_VERSION = jax.__version__

# Before that, XLA's CPU compiler widens bfloat16 even where it only moves it: every row copy converts the whole pool to
# float32 and back (measured on 0.10.2).
CPU_MOVES_BFLOAT16 = jax.__version_info__ >= (0, 11)


def cpu_moves(dtype: Any) -> bool:
    """Whether XLA's CPU compiler copies rows of a dtype without widening the array first; float8 it always widens."""
    if dtype == jnp.bfloat16:
        return CPU_MOVES_BFLOAT16
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits != 8


def abstract_device() -> Any | None:
    """The device that an ahead-of-time compilation names through its abstract mesh, if there is one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def mosaic_interpreter() -> Any | None:
    """What `mosaic_gpu.kernel(interpret=...)` takes to run on the CPU; None before jax 0.11."""
    params = getattr(mosaic_gpu, "InterpretGPUParams", None)
    return None if params is None else params()
