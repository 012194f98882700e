"""The command line: `shmtensor ls`, `top`, `hz`, `echo`, `trace`, `metrics`, `gc`, `doctor`, `demo`, `serve`..."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from typing import Annotated, Final

import typer

from .. import __version__
from .output import prepare_output

COMMANDS: Final = {
    "ls": "channels:ls",
    "top": "top:top",
    "hz": "watch:hz",
    "echo": "watch:echo",
    "trace": "watch:trace",
    "metrics": "watch:metrics",
    "gc": "channels:gc",
    "doctor": "doctor:doctor",
    "demo": "demo:demo",
    "bench": "bench:bench",
    "serve": "services:serve",
    "relay": "services:relay",
    "share": "services:share",
    "checkpoint": "checkpoint:app",
}
"""Where each command is, by its name."""


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The command line with these commands, whose modules are imported."""
    app = typer.Typer(
        name="shmtensor",
        help="Move tensors between processes through shared memory: serve a model, inspect channels, clean up, check "
        "this machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # paragraphs are filled, and brackets stay
    )
    app.callback()(_main)
    for name in names:
        command = pkgutil.resolve_name(f"{__package__}.{COMMANDS[name]}")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shmtensor {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    prepare_output()


def run() -> None:
    """Run the command that this process was started with. Only its module is imported; all of them for the help."""
    names = [name for name in sys.argv[1:2] if name in COMMANDS]
    make_app(names or COMMANDS)(prog_name="shmtensor")


if __name__ == "__main__":
    run()
