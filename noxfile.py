"""Sessions that need environments of their own: every interpreter, and what is published (internals/contributing.md).

| session | what it does |
|---|---|
| `tests` | the suite, in one environment for each interpreter that is installed; missing ones are skipped by name |
| `package` | source distribution and wheel, checked; then the wheel in an empty environment, without a compiler |

Both pass what stands behind `--` to pytest. `package` runs a short part of the transport's tests where nothing stands
there, and all of them with `-- --all`.
"""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False

TREE = Path(__file__).parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
CONSTRAINTS = ["-c", str(TREE / "constraints.txt")]
WITHOUT_TORCH = ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"]
"""What the tests need that run without torch."""
SHORT = [
    "package/test_packaging.py",
    "package/test_implementations.py",
    "endpoints/test_fan_out.py",
    "endpoints/test_work_queue.py",
    "codec/test_codec.py",
]
"""The part of the transport's tests that is run by default, with the compiled module and without it."""


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Install as the README says, and run the suite."""
    session.install(*CONSTRAINTS, "-e", ".[test]", env={"SHMTENSOR_REQUIRE_NATIVE": "1"})
    session.run("python", "-m", "pip", "check")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
def package(session: nox.Session) -> None:
    """Build what is published, check it, and test the wheel as a user gets it."""
    session.install("build", "auditwheel", "twine")
    work = Path(session.create_tmp()).resolve()
    for name in ("dist", "empty", "run"):
        shutil.rmtree(work / name, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(work / "dist"), env={"SHMTENSOR_REQUIRE_NATIVE": "1"})
    (source,) = (work / "dist").glob("*.tar.gz")
    (wheel,) = (work / "dist").glob("*.whl")  # built from the source distribution, not from this tree
    session.run("python", "-m", "tests.package.contents", str(source), str(wheel))
    session.run("python", "-m", "twine", "check", "--strict", str(source), str(wheel))
    session.run("auditwheel", "show", str(wheel))

    session.run("python", "-m", "venv", str(work / "empty"))
    python = str(work / "empty" / "bin" / "python")
    # nothing else on the PATH: neither a compiler nor what a test might find by chance
    alone = {"PATH": str(work / "empty" / "bin"), "PYTHONPATH": None, "VIRTUAL_ENV": None}

    def install(*what: str) -> None:
        session.run(
            python, "-m", "pip", "install", "-q", *CONSTRAINTS, "--only-binary", ":all:", *what,
            external=True, env=alone,
        )  # fmt: skip
        session.run(python, "-m", "pip", "check", external=True, env=alone)

    def test(*what: str) -> None:
        with session.chdir(work / "run"):
            session.run(python, "-m", "pytest", *what, external=True, env=alone)

    # beside the tests there is no package here: `import shmtensor` finds the wheel
    shutil.copytree(TREE / "tests", work / "run" / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(TREE / name, work / "run")
    install(str(wheel), *WITHOUT_TORCH)
    test("tests/package/test_packaging.py")
    install(f"{wheel}[test]")
    if session.posargs == ["--all"]:
        listed = "from tests.implementations import TRANSPORT; print(*sorted(TRANSPORT))"
        with session.chdir(work / "run"):
            names = session.run(python, "-c", listed, external=True, env=alone, silent=True) or ""
        test("tests/package/test_packaging.py", *(f"tests/{name.replace('/', '/test_')}.py" for name in names.split()))
    else:
        test(*(session.posargs or [f"tests/{name}" for name in SHORT]))
