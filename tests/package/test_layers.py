"""The shape of the package: who may import whom, who may touch the kernel, who stores shared words."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shmtensor.cli.main import COMMANDS

from ..faults import points
from ..waiting import PATIENCE

PACKAGE = Path(__file__).parents[2] / "shmtensor"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = (
    ("errors", "options", "statistics", "children", "shielded", "native"),
    ("wire",),
    ("memory",),
    ("cuda",),
    ("ring",),
    ("codec",),
    ("channel",),
    ("observe", "metrics"),
    ("endpoints",),
    ("rpc",),
    ("mp",),
    ("executor",),
    ("checkpoint",),
    ("dcp",),
    ("relay",),
    ("ray",),
    ("cli",),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
MAX_LINES = 800

# module -> attributes of ctypes that it may use: copying bytes needs them; only memory/ reaches libc's system calls
CTYPES = {
    "cuda/runtime.py": {
        "CDLL",
        "POINTER",
        "Structure",
        "byref",
        "c_char",
        "c_char_p",
        "c_int",
        "c_size_t",
        "c_uint",
        "c_void_p",
        "create_string_buffer",
        "string_at",
    },
    "codec/copies.py": {"memmove", "PYFUNCTYPE", "cast", "c_void_p", "c_size_t"},
    "codec/numpy.py": {"addressof", "c_char"},
    "codec/torch.py": {"c_ubyte"},
    "codec/composites.py": {"memmove"},
}
KERNEL = {"mmap", "fcntl", "posix_ipc", "_posixshmem", "_multiprocessing"}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def for_each_module(check):
    """A test of all modules in one, as most of what one test costs is not the check of one file."""

    def test():
        wrong = {}
        for path in MODULES:
            try:
                check(path)
            except AssertionError as error:
                wrong[name_of(path)] = str(error)
        assert not wrong, wrong

    test.__doc__, test.check = check.__doc__, check
    return test


def statements(path: Path):
    """Every node that exists when the program runs: `if TYPE_CHECKING:` bodies are left out."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                for other in child.orelse:
                    yield other
                    yield from walk(other)
                continue
            yield child
            yield from walk(child)

    return walk(ast.parse(path.read_text()))


def imports(path: Path):
    """(line, absolute name) of everything that a module imports, at its top or inside a function."""
    here = ("shmtensor", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in statements(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.lineno, node.module
                continue
            base = here[: len(here) - node.level]
            for alias in [None] if node.module else node.names:
                yield node.lineno, ".".join((*base, node.module or alias.name))


@for_each_module
def test_imports_go_down(path):
    top = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if top in ("__init__", "__main__"):
        return
    assert top in FLOOR, "a new floor: give it a place in FLOORS and in docs/internals/design.md"
    wrong = []
    for line, target in imports(path):
        parts = target.split(".")
        if parts[0] != "shmtensor":
            continue
        floor = FLOOR.get(parts[1] if len(parts) > 1 else "")
        if floor is None and top == "cli" and parts[1:] in ([], ["__version__"]):
            continue  # the top floor may use what users use
        if floor is None or floor > FLOOR[top]:
            wrong.append(f"{name_of(path)}:{line} imports {target}")
    assert wrong == []


def test_an_upward_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "wire").mkdir()
    path = tmp_path / "wire" / "bad.py"
    path.write_text("def late():\n    from ..endpoints import sender\n")
    with pytest.raises(AssertionError, match="endpoints"):
        test_imports_go_down.check(path)


def uses() -> dict[str, set[str]]:
    """Module -> the modules of this package that it imports, at its top or inside a function; names as files have."""
    known = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in known.items():
        found[name] = set()
        here = path.relative_to(PACKAGE).with_suffix("").parts
        for node in statements(path):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = (*here[: len(here) - node.level], *(node.module.split(".") if node.module else ()))
            modules = {"/".join(base), *("/".join((*base, alias.name)) for alias in node.names)}
            found[name] |= {*modules, *(f"{each}/__init__" for each in modules)} & known.keys() - {name}
    return found


def circles(used: dict[str, set[str]]) -> list[str]:
    """Each module that reaches itself; packages' own `__init__` do not count, which only collect names."""
    found = []
    for name in used:
        seen, todo = set(), [name]
        while todo:
            new = {each for each in used[todo.pop()] if not each.endswith("__init__")} - seen
            seen |= new
            todo += new
        if name in seen:
            found.append(name)
    return sorted(found)


def test_no_module_imports_itself_by_way_of_others():
    assert circles(uses()) == []


def test_a_circle_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "one.py").write_text("from .two import name\n")
    (tmp_path / "wire" / "two.py").write_text("def late():\n    from . import one\n")
    (tmp_path / "wire" / "three.py").write_text("from ..wire import two\n")
    assert circles(uses()) == ["wire/one", "wire/two"]


def run_isolated(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_imports_no_torch():
    assert run_isolated("import shmtensor, sys; print('torch' in sys.modules)") == "False"


def test_the_command_line_imports_no_torch():
    source = "from shmtensor.cli.main import make_app; import sys; make_app(); print('torch' in sys.modules)"
    assert run_isolated(source) == "False"


@pytest.mark.parametrize(("arguments", "modules"), [("gc", {"channels"}), ("top", {"channels", "top"}), ("", None)])
def test_a_command_imports_its_own_module(arguments, modules):
    source = f"""
import contextlib, sys
from shmtensor.cli.main import COMMANDS, run

sys.argv = ["shmtensor", *{arguments.split()}, "--help"]
with contextlib.suppress(SystemExit):
    run()
of_commands = {{where.partition(":")[0] for where in COMMANDS.values()}}
print(*(name for name in of_commands if f"shmtensor.cli.{{name}}" in sys.modules))
"""
    found = set(run_isolated(source).splitlines()[-1].split())
    if modules is None:  # the help of the whole
        modules = {where.partition(":")[0] for where in COMMANDS.values()}
    assert found == modules


def test_who_uses_no_segment_server_pays_nothing_for_it():
    """One `lstat` where there is a directory, and none without: nothing is imported, and no thread started."""
    assert (
        run_isolated(
            "import os, sys, threading; os.environ.pop('SHMTENSOR_DIR', None); import shmtensor\n"
            "looked = []\n"
            "real = os.path.lexists; os.path.lexists = lambda path: looked.append(path) or real(path)\n"
            "name = f'pays-{os.getpid()}'\n"
            "with shmtensor.Publisher(name), shmtensor.Subscriber(name):\n"
            "    print([each for each in sys.modules if 'served' in each or 'segment_server' in each], looked, "
            "threading.active_count())"
        )
        == "[] [] 1"
    )


@for_each_module
def test_only_memory_touches_the_kernel(path):
    name = name_of(path)
    if name.startswith("memory/"):
        return
    for line, target in imports(path):
        assert target.split(".")[0] not in KERNEL, f"{name}:{line} imports {target}: that is memory/'s"
    used = set()
    for node in statements(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ctypes":
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "ctypes":
            used |= {alias.name for alias in node.names}
    assert used <= CTYPES.get(name, set())


def test_the_list_of_ctypes_users_is_not_too_long():
    for name, allowed in CTYPES.items():
        source = (PACKAGE / name).read_text()
        assert [each for each in allowed if not re.search(rf"\b{each}\b", source)] == [], name


@for_each_module
def test_one_place_stores_shared_words(path):
    """A word store is `memory.words.store`; `struct.pack_into` clears a word before it stores it."""
    name = name_of(path)
    for node in statements(path):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Subscript):
                assert not re.search(r"(^|[._])words$", ast.unparse(target.value)), f"{name}:{node.lineno}"
        if isinstance(node, ast.Attribute) and node.attr == "pack_into":
            raise AssertionError(f"{name}:{node.lineno} packs into memory")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setitem", "operator.setitem", "_setitem"):
            raise AssertionError(f"{name}:{node.lineno} stores a word by itself")
    if "setitem" in path.read_text():
        assert name == "memory/words.py"


def test_one_place_takes_the_mutex_of_an_endpoint():
    """`_run` and `_try_run`, which know whose thread is inside; all else may ask whether it is taken."""
    takes = re.compile(r"_mutex\b(?!\.locked)")
    found = {name_of(path) for path in MODULES if takes.search(path.read_text())}
    assert found == {"endpoints/base.py"}


@pytest.mark.parametrize("base", ["ring.reader.Reader", "endpoints.recipients.Recipients", "endpoints.base.Endpoint"])
def test_an_incomplete_subclass_cannot_be_made(base):
    module, name = base.rsplit(".", 1)
    kind = getattr(importlib.import_module(f"shmtensor.{module}"), name)
    with pytest.raises(TypeError, match="abstract"):
        type("Incomplete", (kind,), {})()


@for_each_module
def test_module_is_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines"


@for_each_module
def test_no_assert_statements(path):
    """`python -O` removes them, and users cannot act on an AssertionError."""
    assert [node.lineno for node in statements(path) if isinstance(node, ast.Assert)] == []


def test_every_crash_comment_is_a_listed_point():
    """A comment that the fault tests' pattern does not match would be a point that nobody ever comes by."""
    listed = set(points.names())
    for path in MODULES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "crash:" in line:
                match = re.fullmatch(r"\s*# crash: ([a-z]+\.[a-z]+)", line)
                assert match, f"{name_of(path)}:{number}: {line.strip()}"
                assert match[1] in listed
