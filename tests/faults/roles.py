"""What the test process names when it starts a member of the cast; imports no part of the package itself."""

from __future__ import annotations


def play(role: str, pipe, options: dict, *args) -> None:
    """Run in a child of the fork server, where `cast` is loaded already."""
    from . import cast

    getattr(cast, role)(pipe, *args, **options)
