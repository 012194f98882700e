"""What children of the tests of queues do. No torch here: a spawned child that is sent arrays does not import it."""

from __future__ import annotations

import os


def echo(wishes, answers) -> None:
    for item in iter(wishes.get, None):
        answers.put(item)


def answer(tasks, answers) -> None:
    for task in iter(tasks.get, None):
        task["x"] += 1
        answers.put((os.getpid(), task))
