"""The options that several commands share, each spelled once."""

import enum
from typing import Annotated, Any

import typer

from mamba_spec_jax.assets import TINY
from mamba_spec_jax.cli.prompts import NUM_PROMPTS
from mamba_spec_jax.modes import CommitStrategy, SpeculativeMode

BUNDLED = str(TINY)


class Precision(enum.StrEnum):
    """The values of --dtype."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Mode(enum.StrEnum):
    """The values of --mode."""

    DECODE = SpeculativeMode.DECODE.value
    PREFILL = SpeculativeMode.PREFILL.value


class Strategy(enum.StrEnum):
    """The values of --strategy."""

    SNAPSHOT = CommitStrategy.SNAPSHOT.value
    REPLAY = CommitStrategy.REPLAY.value
    AUTO = CommitStrategy.AUTO.value


def title_of(model: str) -> str:
    """What to call a --model in what people read."""
    return "bundled model" if model == BUNDLED else model


def parse_drafts(value: str) -> int | str:
    """A number of drafts a step, or "auto"."""
    if value == "auto":
        return value
    if not value.isdecimal():
        raise typer.BadParameter(f"{value!r} is neither a number of drafts nor 'auto'")
    return int(value)


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A folder or a hub id.", show_default="the bundled model")
]
DtypeOption = Annotated[
    Precision, typer.Option("--dtype", help="auto: float32 on CPUs, float16 before Ampere, bfloat16 from there on.")
]
ModeOption = Annotated[
    Mode, typer.Option("--mode", help="Verify with the step recurrence (decode) or in the chunked form (prefill).")
]
StrategyOption = Annotated[
    Strategy,
    typer.Option("--strategy", help="What a verify pass keeps: a state per token, its inputs, or what pays."),
]
MaxNewOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens a row generates at most.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the draws; rows count up from it.")]
DraftsOption = Annotated[
    Any,
    typer.Option(
        "--drafts", "-k", parser=parse_drafts, metavar="N|auto", help="Tokens drafted a step; auto: whatever pays."
    ),
]
BatchesOption = Annotated[
    list[int], typer.Option("--batch", min=1, max=NUM_PROMPTS, help="Rows at once. May be given several times.")
]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Runs of each kind; the fastest counts.")]
BATCHES = [1, 8]
