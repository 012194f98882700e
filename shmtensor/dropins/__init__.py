"""What takes the place of a class of the standard library: queues, a `multiprocessing` context, an executor."""

from __future__ import annotations

import os
import sys

from ..views import pack


def _copy_alone() -> None:
    """In a forked child: copy without torch's threads.

    They do not survive a fork, and a copy that is shared among them would wait for them for ever (libgomp). Programs
    that put into a queue from forked children, of a parent that has computed before, must not meet that.
    """
    pack.LARGE = sys.maxsize


os.register_at_fork(after_in_child=_copy_alone)
