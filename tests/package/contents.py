"""What a source distribution and a wheel must hold, and must not: `python -m tests.package.contents dist/*`."""

from __future__ import annotations

import argparse
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

TREE = Path(__file__).parents[2]


def names_in(package: Path) -> set[str]:
    """The files of a wheel or of a source distribution, the latter's without its top folder."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(package) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def faults_of_wheel(names: set[str], tree: Path = TREE) -> list[str]:
    """Why these are not the files of a wheel of this tree; empty if they are."""
    modules = {path.relative_to(tree).as_posix() for path in (tree / "shmtensor").rglob("*.py")}
    wanted = {*modules, "shmtensor/py.typed"}
    faults = [f"{name} is missing" for name in sorted(wanted - names)]
    for pattern in ("shmtensor/native/_core.*.so", "*.dist-info/METADATA", "*.dist-info/licenses/LICENSE"):
        if not any(fnmatch(name, pattern) for name in names):
            faults.append(f"{pattern} is missing")
    for name in sorted(names - wanted):
        of_the_package = fnmatch(name, "shmtensor/native/_core.*.so")
        if not (of_the_package or fnmatch(name, "shmtensor-*.dist-info/*") or fnmatch(name, "shmtensor.libs/*.so*")):
            faults.append(f"{name} should not be in a wheel")
    return faults


def faults_of_source(names: set[str], tree: Path = TREE) -> list[str]:
    """Why these are not the files of a source distribution of this tree; empty if they are."""
    wanted = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"}
    wanted |= {"shmtensor/py.typed", "mkdocs.yml", "noxfile.py", ".ci/run", "PKG-INFO"}
    for folder, endings in {"shmtensor": (".py", ".c", ".h"), "tests": (".py", ".c", ".ini"), "docs": (".md",)}.items():
        wanted |= {path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*") if path.suffix in endings}
    wanted = {name for name in wanted if "__pycache__" not in name}
    faults = [f"{name} is missing" for name in sorted(wanted - names)]
    built = [name for name in sorted(names) if name.endswith((".so", ".pyc")) or "__pycache__" in name]
    return faults + [f"{name} was built, and should not be in a source distribution" for name in built]


def main(arguments: list[str]) -> int:
    """Check each; print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=int, help="how many wheels there must be")
    parser.add_argument("packages", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    faults, wheels = [], 0
    for package in options.packages:
        names = names_in(package)
        is_wheel = package.suffix == ".whl"
        wheels += is_wheel
        found = faults_of_wheel(names) if is_wheel else faults_of_source(names)
        faults += [f"{package.name}: {fault}" for fault in found]
        print(f"{package.name}: {len(names)} files")
    if options.wheels not in (None, wheels):
        faults.append(f"{options.wheels} wheels expected, {wheels} found")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
