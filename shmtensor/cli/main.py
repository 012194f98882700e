"""The command line: `shmtensor ls`, `top`, `hz`, `echo`, `trace`, `metrics`, `gc`, `doctor`, `demo`, `serve`..."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .checkpoint import app as checkpoint
from .demo import demo
from .doctor import doctor
from .gc import gc
from .ls import ls
from .output import prepare_output
from .relay import relay
from .serve import serve
from .share import share
from .trace import trace
from .watch import echo, hz, metrics, top

app = typer.Typer(
    name="shmtensor",
    help="Move tensors between processes through shared memory: serve a model, look at channels, clean up, check this "
    "machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # paragraphs are filled, and brackets stay
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shmtensor {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    prepare_output()


app.command()(ls)
app.command()(top)
app.command()(hz)
app.command()(echo)
app.command()(trace)
app.command()(metrics)
app.command()(gc)
app.command()(doctor)
app.command()(demo)
app.command()(bench)
app.command()(serve)
app.command()(relay)
app.command()(share)
app.add_typer(checkpoint, name="checkpoint")

if __name__ == "__main__":
    app(prog_name="shmtensor")
