"""Jumps that an asynchronous exception escapes by: CPython 3.12 and 3.13 leave them out of the `try` that they are in.

A jump back is a place where the interpreter looks for signals. Where a condition jumps back (the end of a `while` with
a condition, of a `for` whose last statement is an `if`, of a comprehension with an `if`), the compiler makes there
an unconditional jump of it, and forgets which `try` or `with` it belongs to. An exception that is raised there
does not pass by `finally`, `except BaseException` and `__exit__`: a lock stays locked.

So where such an exception may arrive, in the threads of users, no such loop stands in one of these. A loop whose last
statement is none of them is fine, and so is one in a function of its own.
"""

from __future__ import annotations

import ast
import dis
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import shmtensor

PACKAGE = Path(shmtensor.__file__).parent
CLOSES_ITSELF = ("open_input(", "open(", "shm.look_at(", "Files(", "contextlib.closing(open_file(")
"""What is opened by these closes its file when nobody refers to it, too."""
SUPPRESSED = "contextlib.suppress("
LIBRARY = "only a thread of the library runs it"
WRITING = "only the writing process runs it"
RESETS = "a pipeline of redis-py is reset when nobody refers to it, too"
NO_INTERRUPT = "no signal's handler raises there"
ENDS = "a benchmark's process, which ends then"
ALLOWED = {
    "checkpoint/answers.py:Sink.write": LIBRARY,
    "checkpoint/redis_files.py:RedisFileSystem._commit": RESETS,
    "checkpoint/redis_files.py:RedisFileSystem.info": RESETS,
    "checkpoint/upload.py:RankUploads._work": WRITING,
    "checkpoint/upload.py:RankUploads.add": WRITING,
    "checkpoint/upload.py:Uploads._work": WRITING,
    "cli/demo.py:Processes._stop": NO_INTERRUPT,
    "cli/demo.py:_make_sender.<locals>.play": ENDS,
    "cli/services.py:relay": NO_INTERRUPT,
    "cli/watch.py:_record": NO_INTERRUPT,
    "cuda/keeper.py:release_finished": LIBRARY,
    "memory/served.py:Served._follow_servers": LIBRARY,
    "relay/far_requests.py:FarService._claim": LIBRARY,
    "relay/far_requests.py:FarService._wait": LIBRARY,
    "relay/far_requests.py:FarService.cancel": LIBRARY,
    "relay/inbound.py:Inbound.forget": LIBRARY,
    "relay/stream.py:Stream._state": LIBRARY,
    "relay/outbound.py:Outbound._requests": LIBRARY,
    "shielded.py:CallQueue._serve": LIBRARY,
}

LOOP = """
def unprotected(lock, queue):
    with lock:
        while queue:
            queue.pop()

def protected(lock, queue):
    with lock:
        while True:
            if not queue:
                break
            queue.pop()
"""


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from functions(each)


def guards(tree: ast.AST) -> Iterator[tuple[range, str]]:
    """The lines of each block whose end has to run whatever is raised in it, and what begins it."""
    for node in ast.walk(tree):
        what = ""
        if isinstance(node, ast.Try):
            is_for_all = any(each.type is None or "BaseException" in ast.unparse(each.type) for each in node.handlers)
            what = "try" if node.finalbody or is_for_all else ""
        elif isinstance(node, ast.With):
            contexts = [ast.unparse(item.context_expr) for item in node.items]
            what = ", ".join(each for each in contexts if not each.startswith((SUPPRESSED, *CLOSES_ITSELF)))
        if what:
            yield range(node.body[0].lineno, node.body[-1].end_lineno + 1), what


def escapes(source: str) -> Iterator[tuple[str, int, str]]:
    """Function, line and block of each jump back that is in a block, and not in its range of the exception table."""
    blocks = list(guards(ast.parse(source)))
    for code in functions(compile(source, "<source>", "exec")):
        table = dis.Bytecode(code).exception_entries
        for each in dis.get_instructions(code):
            line = each.positions.lineno
            if each.opname != "JUMP_BACKWARD" or line is None:
                continue
            there = {entry.target for entry in table if entry.start <= each.argval < entry.end}
            here = {entry.target for entry in table if entry.start <= each.offset < entry.end}
            inside = [what for lines, what in blocks if line in lines and lines.start > code.co_firstlineno]
            if there - here and inside:
                yield code.co_qualname, line, inside[-1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the exception table can be looked at from 3.11 on")
def test_no_exception_escapes_from_a_block_by_a_jump():
    found = {
        f"{path.relative_to(PACKAGE)}:{name}": f"line {line}, in {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, line, what in escapes(path.read_text())
    }
    assert not {where: what for where, what in found.items() if where not in ALLOWED}
    if (3, 12) <= sys.version_info < (3, 14):
        assert found.keys() == ALLOWED.keys()


@pytest.mark.skipif(not (3, 12) <= sys.version_info < (3, 14), reason="other versions have no such jumps")
def test_it_finds_them():
    assert [name for name, _, _ in escapes(LOOP)] == ["unprotected"]
