"""`mamba-spec plan`: what a model would need in memory, before any of it is downloaded or allocated."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mamba_spec_jax.cache.memory import device_bytes, format_bytes
from mamba_spec_jax.cli.options import (
    BUNDLED,
    DtypeOption,
    ModelOption,
    Precision,
    Strategy,
    StrategyOption,
    title_of,
)
from mamba_spec_jax.cli.runtime import choose_policy, describe
from mamba_spec_jax.models.checkpoint import locate, read_json
from mamba_spec_jax.models.families import config_from_hf
from mamba_spec_jax.models.memory import MemoryPlan, plan_memory
from mamba_spec_jax.modes import CommitStrategy
from pallas_kernels.dispatch import target


def plan(
    model: ModelOption = BUNDLED,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows at once.")] = 1,
    max_len: Annotated[int, typer.Option("--max-len", min=1, help="Tokens a row has room for.")] = 4096,
    drafts: Annotated[int, typer.Option("--drafts", "-k", min=0, help="Tokens drafted a step.")] = 8,
    strategy: StrategyOption = Strategy.AUTO,
    dtype: DtypeOption = Precision.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Write bytes by part as JSON.")] = False,
) -> None:
    """List the memory a model needs, by part; reads config.json and nothing else."""
    config = config_from_hf(read_json(_config_file(model)))
    policy = choose_policy(dtype)
    memory = plan_memory(config, batch, max_len, drafts + 1, CommitStrategy(strategy.value), policy)
    if as_json:
        print(json.dumps({"parts": dict(memory.parts), "total": memory.total, "available": device_bytes()}, indent=2))
        return
    title = f"{title_of(model)}\n{batch} x {max_len} tokens, {drafts} drafts, {policy.activations}"
    Console().print(_table(title, memory, device_bytes()))


def _config_file(model: str) -> Path:
    """`config.json` of a folder or of a hub model, or the file itself; nothing else is downloaded."""
    path = Path(model).expanduser()
    return path if path.is_file() else locate(model, files=("config.json",)) / "config.json"


def _table(title: str, memory: MemoryPlan, available: int | None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part")
    table.add_column("memory", justify="right")
    table.add_column("share", justify="right")
    for name, size in memory.parts.items():
        table.add_row(name, format_bytes(size), f"{100 * size / memory.total:.1f} %")
    table.add_section()
    table.add_row("total", format_bytes(memory.total), "", style="bold")
    if available is not None:
        verdict = "[green]fits[/]" if memory.total <= available else "[red]does not fit[/]"
        table.add_row(f"available on {describe(target())}", format_bytes(available), verdict)
    return table
