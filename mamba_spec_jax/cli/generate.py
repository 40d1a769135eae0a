"""`mamba-spec generate`: text from any model, shown as it arrives."""

import json
import sys
import time
from collections.abc import Generator
from typing import Annotated, Any

import typer
from rich.console import Console

from mamba_spec_jax.cli.options import (
    BUNDLED,
    DraftsOption,
    DtypeOption,
    MaxNewOption,
    Mode,
    ModelOption,
    ModeOption,
    Precision,
    SeedOption,
    Strategy,
    StrategyOption,
)
from mamba_spec_jax.cli.runtime import open_model
from mamba_spec_jax.drafting import DRAFTS, load_drafter
from mamba_spec_jax.speculative.drafters.ngram_tree import NgramTreeDrafter
from mamba_spec_jax.speculative.stop import StopReason
from mamba_spec_jax.speculative.stream import StreamEvent
from mamba_spec_jax.text_generation import TextGeneration

PromptArgument = Annotated[str | None, typer.Argument(help="What to continue; from stdin if left out or -.")]
_TOP_K = "Draw from this many of the likeliest tokens."
_TOP_P = "Draw from the likeliest tokens that have this much of the probability."
_MIN_P = "Draw from the tokens that are this likely, compared with the likeliest."
_CHAT = "Take the prompt for a user's message, and put it into the model's chat template."
_DRAFTER = "What drafts: a folder or hub id of a draft head or a smaller model.  [default: prompt lookup]"
_TREE = "Draft a tree of so many nodes a step instead of a chain; --drafts are the levels of a --drafter's."
StopOption = Annotated[
    list[str], typer.Option("--stop", help="Text that ends the output, not shown. May be given several times.")
]


def generate(
    prompt: PromptArgument = None,
    model: ModelOption = BUNDLED,
    chat: Annotated[bool, typer.Option("--chat", help=_CHAT)] = False,
    system: Annotated[str | None, typer.Option("--system", help="The system message of a --chat.")] = None,
    max_new_tokens: MaxNewOption = 128,
    min_new_tokens: Annotated[int, typer.Option("--min-new-tokens", min=0, help="Tokens before the text may end.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0, help="0: the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help=_TOP_K)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1, help=_TOP_P)] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", min=0, max=1, help=_MIN_P)] = None,
    seed: SeedOption = 0,
    stop: StopOption = [],  # noqa: B006, typer wants a list
    drafts: DraftsOption = "auto",
    drafter: Annotated[str | None, typer.Option("--drafter", help=_DRAFTER)] = None,
    tree: Annotated[int | None, typer.Option("--tree", min=1, help=_TREE)] = None,
    mode: ModeOption = Mode.DECODE,
    strategy: StrategyOption = Strategy.AUTO,
    dtype: DtypeOption = Precision.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Write text, tokens and statistics as JSON.")] = False,
) -> None:
    """Continue a prompt, or answer a message."""
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if temperature == 0 and filters:
        raise ValueError("--top-k, --top-p and --min-p need a --temperature above 0: at 0 the likeliest token is taken")
    if drafter is not None and drafts == 0:
        raise ValueError("--drafter was given with --drafts 0, which drafts nothing: leave one of them out")
    if tree is not None and drafts == 0:
        raise ValueError("--tree was given with --drafts 0, which drafts nothing: leave one of them out")
    if system is not None and not chat:
        raise ValueError("--system was given without --chat, which alone has a system message")
    text = _read_prompt(prompt)
    if not text:
        raise ValueError("the prompt is empty: give at least one character to continue")
    if tree is not None and drafter is None and isinstance(drafts, int):
        raise ValueError(
            f"--tree {tree} was given with --drafts {drafts}, but the tree of prompt lookup has no levels: leave "
            "--drafts out"
        )
    loaded, _ = open_model(model, dtype, mode, strategy, progress=None)
    ids = loaded.chat_prompt(_messages(text, system)) if chat else text
    options: dict[str, Any] = {
        "max_new": max_new_tokens,
        "min_new": min_new_tokens,
        "temperature": temperature,
        "seeds": seed,
        "stop": stop,
        "num_drafts": drafts if tree is None else tree,
        "progress": None,
        **filters,
    }
    if drafter is not None:
        levels = drafts if isinstance(drafts, int) else None
        shape = {"max_drafts": levels} if tree is None else {"max_drafts": tree, "depth": levels or DRAFTS}
        options["drafter"] = load_drafter(drafter, loaded, **shape)
    elif tree is not None:
        options["drafter"] = NgramTreeDrafter(tree)
    start = time.perf_counter()
    if as_json:
        generation = loaded.generate(ids, **options)
        report = {"prompt": text, "text": generation.texts[0], "seconds": time.perf_counter() - start}
        print(json.dumps(report | _summary(generation), ensure_ascii=False, indent=2))
        return
    generation = _print(loaded.stream(ids, **options))
    notes = Console(stderr=True)
    if generation.reasons[0] is StopReason.NO_LOGITS:
        notes.print(_NO_LOGITS, style="yellow", highlight=False)
    if notes.is_terminal:
        line = "{new_tokens} tokens in {passes} passes, {mean_acceptance_length:.2f} a pass ({stop_reason})"
        notes.print(line.format(**_summary(generation)), style="dim", highlight=False)


_NO_LOGITS = (
    "The text ends early, because the model's logits are not numbers: its weights are damaged, or too large for the "
    "dtype, which --dtype changes."
)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _read_prompt(prompt: str | None) -> str:
    if prompt not in (None, "-"):
        return prompt
    if sys.stdin.isatty():
        raise ValueError("no prompt: give one as an argument, or pipe it in")
    read = sys.stdin.buffer.read()
    try:
        return read.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{read[error.start]:02x}"
        raise ValueError(f"standard input is not text: its {byte}, expected UTF-8") from error


def _print(events: Generator[StreamEvent, None, TextGeneration]) -> TextGeneration:
    """Prints text as it arrives; what the generation was."""
    while True:
        try:
            event = next(events)
        except StopIteration as end:
            print()
            return end.value
        print(event.text, end="", flush=True)


def _summary(generation: TextGeneration) -> dict[str, Any]:
    statistics = generation.statistics
    return {
        "tokens": generation.tokens[0],
        "new_tokens": len(generation.tokens[0]),
        "stop_reason": generation.reasons[0].name.lower(),
        "passes": int(statistics.passes[0]),
        "drafted": int(statistics.drafted[0]),
        "mean_acceptance_length": float(statistics.mean_acceptance_length),
        "acceptance_histogram": statistics.histogram[0].tolist(),
    }
