"""An HTTP server's listing of a directory, a page of links; and names as its URLs have them."""

from __future__ import annotations

import html.parser
from typing import Any, Final
from urllib.parse import quote, unquote, urljoin

_PLAIN: Final = " =+,@!$&'()*;:~"
"""Characters of names that URLs have as they are."""


def quoted(name: str, also: str = "") -> str:
    """A name as URLs have it. also: further characters that stay, such as the slash between names"""
    return quote(name, safe=_PLAIN + also)


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def linked(key: str, page: bytes) -> list[str]:
    """The keys of the files and directories that a page of links names as lying in it."""
    parser, keys = _Links(), dict[str, None]()
    parser.feed(page.decode("utf-8", "replace"))
    base = key.rstrip("/") + "/"
    bare = base.partition("://")[2].rpartition("@")[2]
    for link in parser.found:
        try:
            target = urljoin(f"http://{bare}", link).partition("#")[0].partition("?")[0].partition("://")[2]
        except ValueError:
            continue
        name = target.removeprefix(bare).removesuffix("/") if target.startswith(bare) else ""
        if name and "/" not in name:
            keys[base + quoted(unquote(name))] = None
    return list(keys)
