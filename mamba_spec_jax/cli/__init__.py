"""The command line: `mamba-spec demo`, `generate`, `check`, `bench`, `plan` and `doctor`."""

from mamba_spec_jax.cli.app import main
