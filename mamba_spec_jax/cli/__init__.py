"""The command line: `mamba-spec demo`, `generate`, `bench`, `plan` and `doctor`."""

from mamba_spec_jax.cli.app import main
