"""One line of a doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what that means or what to do about it."""

    name: str
    status: str
    value: str
    meaning: str
