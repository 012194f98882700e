"""Write `docs/reference/command-line.md` from the commands themselves: `python -m tests.docs.command_line`.

A test compares the page with what this makes.
"""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import typer

from shmtensor.cli.main import make_app

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
HEAD = """# Command line

`shmtensor COMMAND --help` shows the same. `python -m shmtensor` works where the script `shmtensor` is not on the path.
"""


def page() -> str:
    group: Any = typer.main.get_command(make_app())
    parts = [HEAD]
    for name, command in group.commands.items():
        parts.append(_section(f"shmtensor {name}", command, "##"))
        for inner, each in getattr(command, "commands", {}).items():
            parts.append(_section(f"shmtensor {name} {inner}", each, "###"))
    return "\n".join(parts)


def _section(name: str, command: Any, heading: str) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    usage = " ".join([name, *(_metavar(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    text = f"{heading} `{name}`\n\n{inspect.cleandoc(command.help or '')}\n"
    if not hasattr(command, "commands"):
        text += f"\n```text\n{usage}\n```\n"
    rows = [(f"`{_metavar(each).strip('[]')}`", each) for each in arguments]
    rows += [(", ".join(f"`{option}`" for option in each.opts), each) for each in options]
    if rows:
        text += "\n| | meaning | default |\n|---|---|---|\n"
        text += "".join(f"| {shown} | {_cell(_meaning(each))} | {_default(each)} |\n" for shown, each in rows)
    return text


def _meaning(parameter: Any) -> str:
    default = parameter.default
    choices = ", ".join(f"`{each.value}`" for each in type(default)) if isinstance(default, enum.Enum) else ""
    return (parameter.help or "") + (f" One of {choices}." if choices else "")


def _metavar(argument: Any) -> str:
    shown = (argument.metavar or argument.name).upper().strip("{}")
    shown += "..." if argument.nargs == -1 else ""
    return shown if argument.required else f"[{shown}]"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    if parameter.default is None or parameter.default is False or callable(parameter.default):
        return ""
    return f"`{getattr(parameter.default, 'value', parameter.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE}")
