"""What belongs to one process and is neither copied nor pickled: endpoints, and what they hand out."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import ArgumentTypeError


class Local:
    """Base of what stays in its process. Pickling it, or copying it, says what to pass instead."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"{type(self).__name__} belongs to this process and can be neither copied nor pickled: {self._instead()}"
        )

    def _instead(self) -> str:
        """What to pass to another process instead."""
        name = getattr(self, "name", "")
        return f'pass the channel\'s name, "{name}", and make a {type(self).__name__} of its own in the other process'
