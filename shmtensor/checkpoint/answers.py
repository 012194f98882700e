"""What servers say: of files, by what a file system has of them, and by errors."""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

_FINAL: Final = (PermissionError, IsADirectoryError, NotADirectoryError, TypeError, ValueError, NotImplementedError)
"""Errors that another attempt does not mend."""
_NOT_FOUND: Final = (FileNotFoundError, KeyError)
_GONE: Final = (404, 410)
_TIMES: Final = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "modified", "created")
_TAGS: Final = ("ETag", "etag", "generation", "md5Hash", "Last-Modified", "mtime", "LastModified")


def tag_of(info: dict[str, Any]) -> object:
    """What tells a file from another one under its name; None if the file system does not say."""
    found = [(name, str(info[name])) for name in _TAGS if info.get(name)]
    return found[0] if found else None


def changed_at(info: dict[str, Any]) -> int:
    """When a file was written, in ns; 0 if the file system does not say."""
    for name in _TIMES:
        found = info.get(name)
        if isinstance(found, datetime):
            return int(found.timestamp() * 1e9)
        if isinstance(found, (int, float)):
            return int(found * 1e9)
        if isinstance(found, str):
            for parse in (parsedate_to_datetime, datetime.fromisoformat):
                try:
                    return int(parse(found).timestamp() * 1e9)
                except ValueError:
                    continue
    return 0


def status_of(error: BaseException | None) -> int:
    """The status of an HTTP answer that an error stands for; 0 if there is none."""
    answer = getattr(error, "response", None)
    found = [getattr(error, "status" if hasattr(error, "status") else "code", None)]
    if isinstance(answer, dict):  # botocore's
        found.append(answer.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    status = next((each for each in found if isinstance(each, int) and each >= 400), 0)
    if not status and type(error) is OSError and str(error).startswith("Forbidden"):  # gcsfs
        return 403
    return status


def has_no_bucket(error: BaseException) -> bool:
    """Whether S3 says that the bucket does not exist. (What other stores say of it looks as for a missing file.)"""
    answer = getattr(error, "response", None)
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") == "NoSuchBucket"


def is_missing(error: FileNotFoundError) -> bool:
    """Whether a server says that there is no such file. fsspec's for HTTP raises this for whatever the server says, and
    for URLs that cannot be asked for."""
    cause = error.__cause__
    return cause is None or isinstance(cause, _NOT_FOUND) or status_of(cause) in _GONE


def may_pass(error: BaseException) -> bool:
    """Whether another attempt may succeed."""
    cause = error.__cause__
    status = status_of(error)
    if not status and type(error) is OSError:  # s3fs's for what is no file's matter
        status = status_of(cause)
    if status:
        return status >= 500 or status in (408, 425, 429)
    if isinstance(error, FileNotFoundError):  # fsspec's for HTTP hides what the server said, or that there is none
        return cause is not None and not isinstance(cause, _NOT_FOUND) and may_pass(cause)
    return not isinstance(error, (*_FINAL, ImportError)) and "Credentials" not in type(error).__name__
