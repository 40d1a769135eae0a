"""Bundled checkpoints, in Hugging Face's own format."""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
