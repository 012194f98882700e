"""tensorizer: `.tensors` files of CoreWeave's tensorizer, read by that library, where it is installed, and not written.

The bytes that it says its tensors have are compared with the size of the file before memory is taken for them. Its own
hashes are compared when the tensors are read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...errors import ArgumentError, CheckpointError, DependencyError, ShmTensorError
from ..locations import Location, check_same, copy_to_memory, stamp
from ..plan import Plan, plan
from ..remote import RemotePath
from .base import Format, Layout, Opened

_MAGIC: Final = b"|TZR|"


class Tensorizer(Format):
    """Files of tensorizer: a flat dict of tensors."""

    name = "tensorizer"
    suffix = ".tensors"

    def layout(self, plan: Plan, max_shard: int | None = None) -> Layout:
        raise ArgumentError("format 'tensorizer' is read only: its own library writes it")

    def recognizes(self, path: Location, start: bytes) -> bool:
        return start.startswith(_MAGIC)

    def open(self, path: Location) -> Opened:
        copy = copy_to_memory(path) if isinstance(path, RemotePath) else None
        local = Path(path) if copy is None else copy.path
        before = stamp(local)
        size = before.nbytes
        with _read(local, path, lazy_load=True) as found:
            if not 0 <= found.total_tensor_bytes <= size:
                raise CheckpointError(
                    f"{path}: it says that its tensors have {found.total_tensor_bytes} bytes, and has {size} itself"
                )

        def state(map: bool) -> Any:
            with _read(local, path, verify_hash=True) as found:
                made = {_name(name, found): found[name].detach() for name in found}
            check_same(path, before, stamp(local))
            return made

        return Opened(
            self.name, lambda: plan(state(False)), [local], [before], None, None, native=False, state=state,
            shown=path, keeps=copy,
        )  # fmt: skip


def _name(name: str, names: Container[str]) -> str:
    """The name in the state: the library puts a dot before those of a module that was written without a prefix."""
    bare = name.removeprefix(".")
    return name if bare in names else bare


@contextmanager
def _read(local: Path, path: Location, **options: Any) -> Iterator[Any]:
    """tensorizer's reader of a file, `path` in errors. Raises `CheckpointError`, `DependencyError`."""
    try:
        from tensorizer import TensorDeserializer
    except ImportError as error:
        raise DependencyError(
            f"{path} is a file of tensorizer, which reads it: {error}: pip install tensorizer", name=error.name
        ) from None
    try:
        with TensorDeserializer(str(local), device="cpu", **options) as found:
            yield found
    except (OSError, ShmTensorError):
        raise
    except Exception as error:  # whatever the library says of a file that is not right
        raise CheckpointError(f"{path}: tensorizer cannot read it: {type(error).__name__}: {error}") from None
