"""A bar on stderr for what takes long: reading weights, reading prompts, generating."""

import contextlib
from collections.abc import Iterator
from typing import Any

BYTES, TOKENS = "bytes", "tokens"


class Bar:
    """How far something is; hidden if `progress` is None."""

    def __init__(self, progress: Any = None, task: Any = None):
        self._progress = progress
        self._task = task

    @property
    def shown(self) -> bool:
        """Whether anyone sees it: work that runs ahead of the host is waited for only then."""
        return self._progress is not None

    def advance(self, amount: float) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, amount)


@contextlib.contextmanager
def progress_bar(title: str, total: float, unit: str, wanted: bool | None) -> Iterator[Bar]:
    """Shows a bar until the block ends. On a terminal it then vanishes; elsewhere its last state stays as one line.

    Args:
        title: what is going on.
        total: the amount at which it is done.
        unit: of the amount, BYTES or TOKENS.
        wanted: True shows it, False does not, None shows it if stderr is a terminal.
    """
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"progress is {wanted!r}, expected True, False, or None to show a bar only on a terminal")
    if wanted is False:
        yield Bar()
        return
    # Imported here, so that programs that show nothing need not load it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if wanted is None and not console.is_terminal:
        yield Bar()
        return
    amount = (DownloadColumn(),) if unit == BYTES else (MofNCompleteColumn(), TextColumn(unit))
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as progress:
        yield Bar(progress, progress.add_task(title, total=total))
