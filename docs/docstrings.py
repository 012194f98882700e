"""How the docstrings of the package become the pages of `docs/reference`; griffe loads this, see `mkdocs.yml`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PAGE = re.compile(r"docs/((?:guide|internals|reference)/[a-z-]+)\.md")


def as_markdown(text: str) -> str:
    """The docstring with doctests as code blocks, causes and remedies as paragraphs, links in place of paths."""
    text = _PAGE.sub(lambda match: f"[{match[1].split('/')[1].replace('-', ' ')}](../{match[1]}.md)", text)
    text = re.sub(r"^(Cause|Remedy): ", r"\n**\1:** ", text, flags=re.MULTILINE)
    lines, inside = [], False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            lines += ["```pycon"]
            inside = True
        elif not line.strip() and inside:
            lines += ["```"]
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Docstrings(griffe.Extension):
    """Applies `as_markdown` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
