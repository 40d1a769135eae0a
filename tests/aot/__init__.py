"""Compiles the GPU kernels for GPUs that are not there, and checks what came out: `python -m tests.aot.run`."""

import os
import tempfile

# Read when jax is imported, and by Mosaic GPU when it compiles; so before anything else of this package.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MOSAIC_GPU_DUMP_TO"] = tempfile.mkdtemp(prefix="mosaic_ptx_")
os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
