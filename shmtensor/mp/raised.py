"""The transport of an exception from a worker to the caller: the text of its traceback arrives even if the exception
itself cannot be pickled or unpickled."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np

from .pickling import dumps, loads


def _same(failure: Exception) -> Exception:
    return failure


class DescribedError(NamedTuple):
    """An exception's stream and leaves, and beside them the text of its traceback."""

    trace: str
    stream: bytes
    leaves: list[Any]

    @classmethod
    def of(cls, error: BaseException, trace: str, instead: Callable[[Exception], Exception] = _same) -> DescribedError:
        """Describe an exception. One that cannot be pickled is replaced by `instead` of the failure, if that can be."""
        try:
            return cls._of(error, trace)
        except Exception as failure:
            trace = f"{trace}\n\nIt cannot be pickled:\n\n{''.join(traceback.format_exception(failure))}"
            try:
                return cls._of(instead(failure), trace)
            except Exception:  # in its turn
                return cls._of(PicklingError(f"{type(failure).__name__} at the exception of a call"), trace)

    @classmethod
    def _of(cls, error: BaseException, trace: str) -> DescribedError:
        stream, *leaves = dumps(error)
        return cls(trace, b"".join(stream if type(stream) is list else [stream]), leaves)

    def rebuilt(self, cause: Callable[[str], BaseException]) -> BaseException:
        """The exception, with the text of its traceback as its cause. If unpickling it raises, that error has the same
        cause."""
        text = cause(self.trace)
        try:
            error: BaseException = loads([np.frombuffer(self.stream, np.uint8), *self.leaves])
            error.__cause__ = text
            return error
        except BaseException as failure:
            raise failure from text
