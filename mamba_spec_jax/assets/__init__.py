"""Bundled checkpoints, in the formats of published ones: a model, and what drafts for it."""

from pathlib import Path

_FOLDER = Path(__file__).parent

TINY = _FOLDER / "tiny"

EAGLE3 = _FOLDER / "eagle3"
MTP = _FOLDER / "mtp"
DFLASH = _FOLDER / "dflash"
DRAFT_MODEL = _FOLDER / "draft_model"
