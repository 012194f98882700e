"""`shmtensor checkpoint`: inspect, verify and convert checkpoints."""

from __future__ import annotations

import contextlib
import errno
import functools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from ..checkpoint.convert import convert as convert_checkpoint
from ..checkpoint.convert import decrypt_file, encrypt_file
from ..checkpoint.description import combine
from ..checkpoint.envelope import SUFFIX
from ..checkpoint.formats import FORMATS, Opened
from ..checkpoint.index import LATEST
from ..checkpoint.keys import KEY_BYTES, Key, MasterKey
from ..checkpoint.listing import CheckpointInfo, listed
from ..checkpoint.load import check, check_options, is_archive
from ..checkpoint.locations import location
from ..checkpoint.opening import Opener, open_path
from ..checkpoint.plan import Entry
from ..checkpoint.remote import RemotePath, is_url, without_secrets
from ..errors import ArgumentError, CheckpointError, ShmTensorError
from ..options import format_bytes, parse_bytes, reason
from .output import AsJson, console, fail, guarded, print_json, seconds, signals_interrupt, visible

app = typer.Typer(help="Inspect, verify, convert, encrypt, decrypt and list checkpoints.", no_args_is_help=True)

_F = TypeVar("_F", bound=Callable[..., Any])
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
_Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Remove the source when the new file is on disk, which takes over its step, metrics, `latest`, `best`.",
    ),
]
_ReadableNames = Annotated[
    bool, typer.Option("--readable-names", help="Names, shapes and dtypes of the tensors are readable without the key.")
]
_Readers = Annotated[int | None, typer.Option("--readers", help="Threads that read; by default one per core, 4 to 8.")]
_KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="A file with the key: 32 bytes, or 64 hexadecimal digits.")
]
_Passphrase = Annotated[bool, typer.Option("--passphrase", help="Ask for the passphrase of the key.")]
_SHOWN = 40
_WITH_METRICS = 120
"""Columns of a terminal from which the table has one of metrics."""


def _command(function: _F) -> _F:
    """Add a command, which prints an OSError as one line and exits with code 1, as for the library's own errors."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShmTensorError:
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:  # nobody reads the output any more
                raise
            raise fail(reason(error)) from None

    return app.command()(guarded(run))  # type: ignore[return-value]


@_command
def info(
    path: Annotated[str, typer.Argument(help="A file, a directory of shards or of checkpoints, or a URL.")],
    every: Annotated[bool, typer.Option("--all", help=f"List every tensor, not only {_SHOWN}.")] = False,
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint contains, without reading tensors. Exit code 1 if it cannot be opened.

    Without the key, only the readable part of an encrypted checkpoint is shown, which is not authenticated."""
    opened = open_path(path, _opener(key_file, passphrase, locked=True))
    if as_json:
        print_json(_as_dict(opened))
        return
    out = console()
    plan = opened.plan
    size = format_bytes(sum(opened.sizes))
    by = ("" if opened.native else ", written by another program") + (", encrypted" if opened.encrypted else "")
    out.print(f"[bold]{visible(str(opened.main))}[/]  {opened.format}{by}, {size}", soft_wrap=True)
    if len(opened.files) > 1:
        out.print(f"  {len(opened.files)} files")
    digest = combine(opened.digests) if opened.digests is not None else "none"
    if opened.locked and not plan.tensors:
        out.print("  its tensors' names are not readable: pass --key-file or --passphrase")
        return
    out.print(f"  {len(plan.tensors)} tensors, {format_bytes(plan.nbytes)}, digest {digest}")
    kinds = Counter(_dtype(entry) for entry in plan.tensors)
    out.print("  " + visible(", ".join(f"{count} {name}" for name, count in kinds.most_common())))
    if plan.meta is not None:
        out.print(f"  meta {visible(str(plan.meta))}", soft_wrap=True)
    listed = plan.tensors if every else plan.tensors[:_SHOWN]
    if listed:
        out.print(_tensor_table(listed))
    if len(listed) < len(plan.tensors):
        out.print(f"  and {len(plan.tensors) - len(listed)} more: --all")


@_command
def verify(
    paths: Annotated[list[str], typer.Argument(help="Files, directories of shards or of checkpoints; or URLs.")],
    readers: _Readers = None,
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte and compare it with the digests in the files.

    Exit code 1 if anything is damaged or cannot be opened. Files of other programs have no digests: in a zip archive
    (.pt, .npz) each member is compared with its CRC-32; in other files only the structure is checked. The output says
    so. Every segment of an encrypted file is decrypted, which needs the key.
    """
    count = _number_of_readers(readers)
    opener = _opener(key_file, passphrase)
    reports = []
    for path in paths:
        report = _verify(path, count, opener, bar=not as_json)
        reports.append(report)
        if not as_json:
            _show_report(report)
    if as_json:
        print_json({"checkpoints": reports})
    if not all(report["ok"] for report in reports):
        raise typer.Exit(1)


@_command
def convert(
    source: Annotated[str, typer.Argument(help="A checkpoint of any format, or its URL.")],
    target: Annotated[str, typer.Argument(help="The new file; with --max-shard a directory; or a URL.")],
    format: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(FORMATS)}; default: by the suffix.")
    ] = None,
    max_shard: Annotated[str | None, typer.Option("--max-shard", help='Most bytes of a file, such as "4GiB".')] = None,
    overwrite: _Overwrite = False,
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    encrypt_with: Annotated[
        Path | None, typer.Option("--encrypt-with", help="A file with the key to encrypt the new checkpoint with.")
    ] = None,
    readable_names: _ReadableNames = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint again in another format. It appears under its name when it is complete and on disk.

    For a URL it is written to the directory for temporary files, and then uploaded. The key is that of the source. The
    new checkpoint is encrypted only with --encrypt-with.
    """
    try:
        limit = None if max_shard is None else parse_bytes(max_shard, "--max-shard")
        if readable_names and encrypt_with is None:
            raise ArgumentError("--readable-names is for encrypted checkpoints: pass --encrypt-with as well")
        opened = open_path(source, _opener(key_file, passphrase))
        master = None if encrypt_with is None else MasterKey.of(_read_key(encrypt_with))
        is_remote = isinstance(location(target), RemotePath)
        what, times = ("converting and uploading", 2) if is_remote else ("converting", 1)
        ended_regularly = signals_interrupt(signal.SIGTERM, signal.SIGHUP)
        with ended_regularly, _bar(what, opened.plan.nbytes * times, shown=not as_json) as progress:
            made = convert_checkpoint(
                opened, target, format, max_shard=limit, overwrite=overwrite, master=master,
                readable_names=readable_names, progress=progress,
            )  # fmt: skip
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    if as_json:
        print_json({"path": str(made.path), "bytes": made.nbytes, "digest": made.digest})
    else:
        console().print(
            f"wrote {visible(str(made.path))}  {format_bytes(made.nbytes)}, digest {made.digest}", soft_wrap=True
        )


@_command
def encrypt(
    source: Annotated[Path, typer.Argument(help="A checkpoint file of any format.")],
    target: Annotated[Path | None, typer.Argument(help=f"The new file; by default with {SUFFIX} added.")] = None,
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    readable_names: _ReadableNames = False,
    overwrite: _Overwrite = False,
    replace: _Replace = False,
    as_json: AsJson = False,
) -> None:
    """Encrypt a checkpoint file of this machine. The source is kept unless --replace is given."""
    try:
        _check_local(source, target)
        master = MasterKey.of(_needed_key(key_file, passphrase, confirm=True))
        with _bar("encrypting", source.stat().st_size, shown=not as_json) as progress:
            made = encrypt_file(
                source, target, master, readable_names=readable_names, overwrite=overwrite, replace=replace,
                progress=progress,
            )  # fmt: skip
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    _show_written(made, as_json=as_json)


@_command
def decrypt(
    source: Annotated[Path, typer.Argument(help="An encrypted checkpoint file.")],
    target: Annotated[Path | None, typer.Argument(help=f"The new file; by default without {SUFFIX}.")] = None,
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    overwrite: _Overwrite = False,
    replace: _Replace = False,
    as_json: AsJson = False,
) -> None:
    """Decrypt a checkpoint file of this machine: byte for byte the one that was encrypted. The source is kept unless
    --replace is given."""
    try:
        _check_local(source, target)
        opener = _opener(key_file, passphrase, needed=True)
        with _bar("decrypting", source.stat().st_size, shown=not as_json) as progress:
            made = decrypt_file(source, target, opener, overwrite=overwrite, replace=replace, progress=progress)
    except ArgumentError as error:
        raise fail(reason(error), 2) from None
    _show_written(made, as_json=as_json)


def _check_local(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and is_url(path):
            raise ArgumentError("files of this machine are encrypted and decrypted: use convert for a URL")


def _show_written(path: Path, *, as_json: bool) -> None:
    nbytes = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "bytes": nbytes})
    else:
        console().print(f"wrote {visible(str(path))}  {format_bytes(nbytes)}", soft_wrap=True)


@_command
def ls(
    directory: Annotated[str, typer.Argument(help="A directory of checkpoints, or its URL.")] = ".",
    key_file: _KeyFile = None,
    passphrase: _Passphrase = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a directory, the newest first: step, size, metrics, names that lead to them (`latest`,
    `best`; not at URLs), and which are not complete."""
    root = location(directory)
    if not root.is_dir():
        raise fail(f"{root} is no directory")
    opener = _opener(key_file, passphrase, locked=True)
    rows = listed(root, opener, _row)
    if as_json:
        print_json({"directory": str(root), "checkpoints": rows})
        return
    out = console()
    if not rows:
        out.print("no checkpoints")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", overflow="fold")  # the others keep their width
    is_wide = out.width >= _WITH_METRICS
    metrics = is_wide and any(row["metrics"] for row in rows)
    for heading in ("format", "step", "bytes", "tensors", "age", *["metrics"] * metrics, ""):
        number = heading in ("step", "bytes", "tensors", "age")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading != "metrics", overflow="fold")
    for row in rows:
        whole = not row["error"]
        table.add_row(
            visible(row["name"]), row["format"] or "", "" if row["step"] is None else str(row["step"]),
            format_bytes(row["bytes"]) if whole else "", "" if row["tensors"] is None else str(row["tensors"]),
            seconds(max(0.0, time.time() - row["time"])), *[_metrics(row)] * metrics,
            visible(", ".join(row["aliases"])) if whole else "[red]error[/]",
        )  # fmt: skip
    out.print(table, soft_wrap=True)
    for row in rows:  # below the table, as a long text would squeeze its columns
        if row["metrics"] and not is_wide:
            out.print(f"{visible(row['name'])}: {_metrics(row)}", soft_wrap=True)
        if row["error"]:
            out.print(f"[red]{visible(row['name'])}:[/] {visible(row['error'])}", soft_wrap=True)


def _metrics(row: dict[str, Any]) -> str:
    return visible(", ".join(f"{name}={value:.6g}" for name, value in row["metrics"].items()))


def _row(info: CheckpointInfo, opened: Opened | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": info.name, "format": info.format, "step": info.step, "bytes": info.nbytes, "tensors": None,
        "time": info.time, "metrics": dict(info.metrics),
        "aliases": list(info.aliases), "latest": LATEST in info.aliases, "error": info.error,
        "encrypted": info.encrypted, "uploaded": info.uploaded,
    }  # fmt: skip
    try:
        if opened is None or (opened.locked and not opened.plan.tensors):
            return row | {"tensors": None}  # nobody can know
        return row | {"tensors": len(opened.plan.tensors)}
    except CheckpointError as error:  # of a file of torch's own, which is opened by torch
        return row | {"error": reason(error)}


def _number_of_readers(readers: int | None) -> int:
    try:
        return check_options(readers, True)
    except ShmTensorError as error:
        raise fail(reason(error), 2) from None


def _verify(path: str, readers: int, opener: Opener, *, bar: bool) -> dict[str, Any]:
    report: dict[str, Any] = {
        "path": without_secrets(path), "ok": False, "format": None, "digests": False, "crc32": False, "bytes": 0,
        "damaged": [], "error": None,
    }  # fmt: skip
    try:
        opened = open_path(path, opener)
        nbytes = opened.plan.nbytes if opened.state is None else sum(opened.sizes)  # no plan of what torch opens
        report |= {
            "path": str(opened.main), "format": opened.format,
            "digests": opened.digests is not None or opened.encrypted,  # every segment has a tag
            "crc32": opened.digests is None and not opened.encrypted and is_archive(opened),
            "bytes": nbytes,
        }  # fmt: skip
        with _bar(opened.main.name, nbytes, shown=bar) as progress:
            damaged = check(opened, readers=readers, progress=progress)
    except CheckpointError as error:
        return report | {"error": reason(error)}
    except OSError as error:  # it is not there, or a server or disk does not answer: that says nothing of the bytes
        return report | {"ok": None, "error": reason(error)}
    report["damaged"] = [
        {"tensors": each.names, "file": str(each.path), "offset": each.offset, "error": str(each)} for each in damaged
    ]
    return report | {"ok": not damaged}


def _show_report(report: dict[str, Any]) -> None:
    out = console()
    path = visible(report["path"])
    if report["ok"]:
        crc32 = report["crc32"]
        checked = "its structure and the CRC-32 of members were checked" if crc32 else "only its structure was checked"
        note = "" if report["digests"] else f", [yellow]no digests: {checked}[/]"
        out.print(f"[green]ok[/] {path}  {format_bytes(report['bytes'])}{note}", soft_wrap=True)
        return
    out.print(f"[red]{'not checked' if report['ok'] is None else 'bad'}[/] {path}", soft_wrap=True)
    for text in [report["error"]] if report["error"] else [each["error"] for each in report["damaged"]]:
        out.print(f"  {visible(text)}", soft_wrap=True)


@contextlib.contextmanager
def _bar(label: str, total: int, *, shown: bool) -> Iterator[Callable[[int], Any]]:
    """A progress bar on stderr, if that is a terminal."""
    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=out, disable=not (shown and out.is_terminal), transient=True) as progress:
        task = progress.add_task(visible(label), total=total)
        yield functools.partial(progress.advance, task)


def _opener(key_file: Path | None, passphrase: bool, *, locked: bool = False, needed: bool = False) -> Opener:
    """How to open the files of a command. `locked` allows encrypted ones without a key, `needed` asks for one."""
    if not needed and key_file is None and not passphrase:
        return Opener(locked=locked, option="--key-file or --passphrase")
    return Opener(_needed_key(key_file, passphrase), option="--passphrase" if key_file is None else "--key-file")


def _needed_key(key_file: Path | None, passphrase: bool, *, confirm: bool = False) -> Key:
    """The key that the options name. `confirm`: ask twice for a passphrase."""
    if (key_file is None) == (not passphrase):
        raise fail("pass the key by one of --key-file and --passphrase", 2)
    if key_file is not None:
        return _read_key(key_file)
    text: str = typer.prompt("passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return text


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        data = file.read(4 * KEY_BYTES)
    if len(data) == KEY_BYTES:
        return data
    text = data.strip()
    if len(text) == 2 * KEY_BYTES and all(each in b"0123456789abcdefABCDEF" for each in text):
        return bytes.fromhex(text.decode("ascii"))
    raise fail(f"{path} is no key: {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal digits, are needed", 2)


def _dtype(entry: Entry) -> str:
    return entry.dtype if isinstance(entry.dtype, str) else str(entry.numpy)


def _tensor_table(entries: list[Entry]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    for heading in ("tensor", "dtype", "shape", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for entry in entries:
        table.add_row(visible(entry.name), visible(_dtype(entry)), visible(str(list(entry.shape))), str(entry.nbytes))
    return table


def _as_dict(opened: Opened) -> dict[str, Any]:
    plan = opened.plan
    places = opened.places
    return {
        "path": str(opened.main),
        "format": opened.format,
        "native": opened.native,
        "encrypted": opened.encrypted,
        "locked": opened.locked,
        "files": [{"name": file.name, "bytes": size} for file, size in zip(opened.files, opened.sizes, strict=True)],
        "bytes": plan.nbytes,
        "digest": combine(opened.digests) if opened.digests is not None else None,
        "meta": plan.meta,
        "tensors": [
            {
                "name": entry.name, "library": "torch" if entry.torch else "numpy", "dtype": _dtype(entry),
                "shape": list(entry.shape), "bytes": entry.nbytes,
                "file": opened.files[places[entry.region][0]].name if places and entry.region >= 0 else None,
                "offset": places[entry.region][1] + entry.offset if places and entry.region >= 0 else None,
            }
            for entry in plan.tensors
        ],
    }  # fmt: skip
