"""The program itself: what it is called with, and how it fails."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mamba_spec_jax import __version__
from mamba_spec_jax.cli.bench import bench
from mamba_spec_jax.cli.check import check
from mamba_spec_jax.cli.demo import demo
from mamba_spec_jax.cli.doctor import doctor
from mamba_spec_jax.cli.generate import generate
from mamba_spec_jax.cli.plan import plan
from mamba_spec_jax.cli.runtime import keep_compiled_programs

app = typer.Typer(
    help="Speculative decoding for hybrid recurrent language models, in JAX.",
    no_args_is_help=True,
    add_completion=False,  # importing jax is too slow for it
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for command in (demo, generate, check, bench, plan, doctor):
    app.command()(command)

_FAILED = 2
_HINT = "mamba-spec --debug ... shows where"


@dataclasses.dataclass
class _Settings:
    """What the options before the command say, for `main` to see when an error ends the command."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mamba-spec-jax {__version__}")
        raise typer.Exit


@app.callback()
def _configure(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep compiled programs for later runs, in the user's cache.")
    ] = True,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj.debug = debug
    if cache:
        keep_compiled_programs()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and exits; `arguments` are the process's own by default.

    An error is one line on stderr and exit code 2. For Ctrl-C see `mamba_spec`, which calls this.
    """
    settings = _Settings()
    try:
        app(None if arguments is None else list(arguments), prog_name="mamba-spec", obj=settings)
    except Exception as error:
        if settings.debug:
            raise
        print(f"mamba-spec: {_one_line(error)}", file=sys.stderr)
        sys.exit(_FAILED)


def _one_line(error: Exception) -> str:
    """The message, with the error's kind where it was not written for the reader of a command line."""
    message = " ".join(str(error).split())
    if message and isinstance(error, ValueError | MemoryError | NotImplementedError | OSError | ImportError):
        return message
    kind = type(error).__name__
    return f"{kind}: {message} ({_HINT})" if message else f"{kind} ({_HINT})"
