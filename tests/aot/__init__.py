"""Compiles the GPU kernels for GPUs that are not there, and checks what came out: `python -m tests.aot.run`."""
