"""The documentation is true: its code runs, its tables are the code's, its examples pack, its commands exist."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import shmtensor
import shmtensor.metrics
from shmtensor import options as sizes
from shmtensor.codec.implementation import decode, encode
from shmtensor.endpoints.base import Endpoint
from shmtensor.ring import states
from shmtensor.wire import record, spec

from ..faults import points
from . import command_line

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ENDPOINT = re.compile(r'\b((?:Publisher|Subscriber|Producer|Consumer|Client|Server)\(|WorkerPool\(.*name=)"([^"]+)"')


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def rows(text: str) -> list[tuple[str, ...]]:
    """Cells of every table row, headings included."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not re.match(r"\|[-|: ]+\|$", line)]
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]


def own_channels(source: str, channel: str) -> str:
    """The source with every channel name made this test's own."""
    return _ENDPOINT.sub(lambda match: f'{match[1]}"{channel}-{match[2]}"', source)


# --- code in documents


@pytest.mark.parametrize("path", [page for page in PAGES if blocks(page.read_text(), "python")], ids=page_name)
def test_python_blocks_run(path, channel, tmp_path, monkeypatch, capsys):
    """The blocks of a page run one after another in one namespace, and print what their comments say."""
    monkeypatch.chdir(tmp_path)
    source = "\n".join(blocks(path.read_text(), "python"))
    namespace: dict = {"__name__": path.stem}
    try:
        exec(compile(own_channels(source, channel), f"{path.name} (python blocks)", "exec"), namespace)
        printed = capsys.readouterr().out.splitlines()
    finally:
        for value in list(namespace.values()):
            if isinstance(value, (Endpoint, shmtensor.Client, shmtensor.Server)):
                value.close()
        namespace.clear()
    expected = re.findall(r"print\(.*\)  # (.*)$", source, re.MULTILINE)
    wanted = iter(printed)
    missing = [line for line in expected if not line.startswith("a view") and line not in wanted]
    assert missing == [], printed


PUBLIC = [getattr(shmtensor, name) for name in shmtensor.__all__ if inspect.isclass(getattr(shmtensor, name))]


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test
        for item in (*PUBLIC, shmtensor.inspect, shmtensor.metrics.collector, shmtensor, sizes)
        for test in finder.find(item)
        if test.examples
    ]
    return list({test.name: test for test in found}.values())


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_docstring_examples(test, channel):
    for example in test.examples:
        example.source = own_channels(example.source, channel)
    test.globs = dict(vars(inspect.getmodule(sizes)), shmtensor=shmtensor) if "options" in test.name else {}
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append, clear_globs=True)
    assert result.attempted
    assert not result.failed, "".join(said)


@pytest.mark.parametrize(
    "name", ["Publisher", "Producer", "Message", "Client", "Server", "Request", "Batch", "WorkerPool"]
)
def test_public_classes_have_an_example(name):
    assert ">>> " in getattr(shmtensor, name).__doc__


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Publisher", "aclose aloan asend close closed loan name send statistics wait_for_subscribers"),
        ("Subscriber", "aclose arecv close closed name recv statistics unread wait_for_publishers"),
        ("Producer", "aclose aloan asend close closed loan name send statistics wait_for_consumers"),
        ("Consumer", "aclose arecv close closed name recv statistics unread wait_for_producers"),
        ("Message", "attempt copy meta missed nbytes release sender sent_at sent_monotonic seq to value"),
    ],
)
def test_users_see_what_they_need(name, shown):
    assert [each for each in dir(getattr(shmtensor, name)) if not each.startswith("_")] == shown.split()


def test_public_things_are_documented():
    bare = []
    for kind in PUBLIC:
        members = [kind, *(value for name, value in vars(kind).items() if not name.startswith("_"))]
        for member in members:
            if (inspect.isroutine(member) or isinstance(member, (type, property))) and not inspect.getdoc(member):
                bare.append(f"{kind.__name__}.{getattr(member, '__name__', member)}")
    assert bare == []


def test_readme_example_is_short():
    assert len(blocks(text_of("README.md"), "python")[0].splitlines()) <= 10


# --- set-up


def test_readme_has_exactly_two_commands():
    commands = [
        line for block in blocks(text_of("README.md"), "(?:sh|bash|shell|console)") for line in block.splitlines()
    ]
    assert len(commands) == 2
    run, test = commands
    for command in commands:
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt ")
    assert run.endswith("&& .venv/bin/shmtensor demo")
    assert test.endswith("&& .venv/bin/python -m pytest")
    assert test in text_of(".ci/run")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


# --- the command line


def commands() -> dict:
    from shmtensor.cli.main import make_app

    return typer.main.get_command(make_app()).commands


def test_readme_names_every_command():
    """Their options stand in docs/reference/command-line.md, which is written from the commands themselves."""
    said = {
        row[0].strip("`").removeprefix("shmtensor ") for row in rows(text_of("README.md")) if "`shmtensor " in row[0]
    }
    assert said == set(commands())


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_named_commands_exist(path):
    named = {
        (name, tuple(options.split()))
        for name, options in re.findall(r"`shmtensor ([a-z]+)((?: --[a-z-]+)*)", path.read_text())
    }
    for name, options in named:
        assert name in commands()
        known = {option for parameter in commands()[name].params for option in parameter.opts}
        assert set(options) <= known


def test_the_reference_of_the_command_line_is_what_the_commands_say():
    assert command_line.PAGE.read_text() == command_line.page(), "run: python -m tests.docs.command_line"


# --- the public names


def test_dir_and_star_show_what_is_public():
    assert dir(shmtensor) == sorted(shmtensor.__all__)
    assert shmtensor.__all__ == sorted(shmtensor.__all__)
    assert all(hasattr(shmtensor, name) for name in shmtensor.__all__)


def classes_returned(function) -> set[str]:
    """The classes of this package that the annotation of a function's result names."""
    scope = vars(sys.modules[function.__module__])
    named = {name: scope.get(name) for name in re.findall(r"\w+", str(function.__annotations__.get("return", "")))}
    return {name for name, kind in named.items() if inspect.isclass(kind) and kind.__module__.startswith("shmtensor")}


def test_what_public_calls_return_is_exported():
    functions = [getattr(shmtensor, name) for name in shmtensor.__all__ if inspect.isfunction(getattr(shmtensor, name))]
    bases = {base for kind in PUBLIC for base in kind.__mro__ if base.__module__.startswith("shmtensor")}
    for base in bases:
        for name, member in vars(base).items():
            target = member.fget if isinstance(member, property) else member
            if inspect.isfunction(target) and not name.startswith("_"):
                functions.append(target)
    returned = set().union(*map(classes_returned, functions))
    assert returned >= {"SaveHandle", "Progress", "Message", "CheckpointInfo", "WriterStatistics", "SenderStatistics"}
    assert returned - {kind.__name__ for kind in PUBLIC} == set()


def test_the_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = re.findall(r"^::: shmtensor\.(\w+)$", pages, re.MULTILINE)
    assert sorted(shown) == [name for name in shmtensor.__all__ if name != "__version__"]


def test_every_error_says_its_cause_and_its_remedy():
    for name in shmtensor.__all__:
        kind = getattr(shmtensor, name)
        if (
            inspect.isclass(kind)
            and issubclass(kind, shmtensor.ShmTensorError)
            and kind is not shmtensor.ShmTensorError
        ):
            text = inspect.getdoc(kind)
            assert re.search(r"^Cause: ", text, re.MULTILINE), name
            assert re.search(r"^Remedy: ", text, re.MULTILINE), name


def test_every_field_of_statistics_is_described():
    for name in shmtensor.__all__:
        if name.endswith("Statistics"):
            kind = getattr(shmtensor, name)
            body = ast.parse(inspect.cleandoc(inspect.getsource(kind))).body[0].body[1:]
            fields = [each.target.id for each in body if isinstance(each, ast.AnnAssign)]
            told = [one.target.id for one, other in itertools.pairwise(body) if isinstance(other, ast.Expr)]
            assert fields == told == [field.name for field in dataclasses.fields(kind)]


# --- the site


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def test_the_overview_for_language_models_leads_to_pages():
    targets = re.findall(r"\]\(([^)]+)\)", text_of("docs/llms.txt"))
    assert targets
    assert [target for target in targets if not (ROOT / "docs" / target).is_file()] == []
    guides = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "guide").glob("*.md")}
    assert guides <= set(targets)


# --- links


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if not re.match(r"[a-z]+://", target):
            assert (path.parent / target).exists(), target


# --- slots.md

TABLES = {"Fan-out": states.FAN_OUT, "Work queue": states.WORK_QUEUE, "Group": states.GROUP}


@pytest.mark.parametrize(("heading", "table"), TABLES.items())
def test_slot_tables_are_the_code(heading, table):
    section = text_of("docs/internals/slots.md").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    assert rows(section)[1:] == [(t.source.value, t.target.value, t.who, t.by, t.when) for t in table]
    drawing = section.split("```")[1]
    assert set(re.findall(r"\b[A-Z]{4,}\b", drawing)) == {state.name for t in table for state in (t.source, t.target)}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_slot_state_is_reached_and_left(table):
    assert {t.source for t in table} == {t.target for t in table}
    reached = {table[0].source}
    for _ in table:
        reached |= {t.target for t in table if t.source in reached}
    assert reached == {t.source for t in table}


# --- wire-format.md


def hex_blocks() -> list[bytes]:
    dumps = []
    for block in blocks(text_of("docs/internals/wire-format.md"), "hex"):
        data = bytearray()
        for line in block.splitlines():
            at, digits = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+?)(?:  .*)?$", line).groups()
            assert int(at, 16) == len(data)
            data += bytes.fromhex(digits)
        dumps.append(bytes(data))
    return dumps


VALUE, META = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), {"ts": 1.5}


def test_worked_example_packs():
    shown, payload, envelope = hex_blocks()
    packed = encode(VALUE, META)
    body = record.BODY.pack(10**9, record.VERSION, 0, 0, 2, 1, len(packed.description), 0, packed.nbytes)
    whole = (struct.pack("<Q", 7) + body + packed.description).ljust(record.SIZE, b"\0")
    assert whole == shown.ljust(record.SIZE, b"\0")
    block = np.empty(packed.nbytes, np.uint8)
    packed.copy_into(block)
    assert block.tobytes() == payload
    bell = record.pack_bell(0x0123456789ABCDEF, whole)
    assert bell == envelope + whole
    assert len(bell) == record.BELL_SIZE
    assert record.parse_bell(bell) == (0x0123456789ABCDEF, 7, 0, 2)


def test_worked_example_unpacks():
    shown, payload, _ = hex_blocks()
    head = record.unpack_constant(shown, record.CONSTANT_OFFSET)
    record.check_head(head, ring=0, slot=2, slots=4, slot_bytes=64)
    description = shown[record.INLINE_OFFSET : record.INLINE_OFFSET + head[5]]
    value, meta = decode(description, np.frombuffer(payload, np.uint8).copy(), readonly=False)
    assert torch.equal(value, VALUE)
    assert meta == META


def test_worked_example_is_what_a_sender_writes(channel):
    shown, payload, _ = hex_blocks()
    with shmtensor.Publisher(channel, slots=8) as pub:
        for _ in range(7):
            pub.send(VALUE, META)
        ring = pub._rings[0]
        slot = 0  # the first is free again each time
        at = ring.records + slot * record.SIZE
        seen = bytearray(ring.view[at : at + record.SIZE])
        seen[8:16] = shown[8:16]  # the clock
        seen[24:28] = shown[24:28]  # the slot
        assert seen == shown.ljust(record.SIZE, b"\0")
        assert bytes(ring.buffer[slot * ring.slot_bytes :][: len(payload)]) == payload


@pytest.mark.parametrize("module", [record, spec], ids=lambda module: module.__name__)
def test_byte_tables_are_the_code(module):
    tables = [part for part in module.__doc__.split("\n\n") if part.startswith("|")]
    assert tables
    assert [table for table in tables if table not in text_of("docs/internals/wire-format.md")] == []


def test_record_table_adds_up():
    table = [row for row in rows(record.__doc__) if row[0].isdigit()]
    sizes = {"u16": 2, "u32": 4, "u64": 8, "208 bytes": 208}
    at = 0
    for offset, kind, *_ in table:
        assert int(offset) == at
        at += sizes[kind]
    assert at == record.SIZE


def test_limits_are_the_code():
    text = text_of("docs/internals/wire-format.md")
    assert f"{spec.MAX_NDIM} dimensions, {spec.MAX_DEPTH} levels of containers, {spec.MAX_LEAVES:,} leaves" in text
    assert spec.MAX_DESCRIPTION == 16 << 20
    assert spec.MAX_META == 64 << 10


# --- contributing.md


def test_crash_points_are_as_documented():
    assert points.names()
    assert all(re.fullmatch(r"[a-z]+\.[a-z]+", name) for name in points.names())
    for name in re.findall(r"# crash: ([a-z.]+)$", text_of("docs/internals/contributing.md"), re.MULTILINE):
        assert name in points.names()
