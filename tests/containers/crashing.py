"""`shmtensor share` that kills itself at a crash point: `python -m tests.containers.crashing POINT share ...`."""

from __future__ import annotations

import sys

from ..faults import points


def main() -> None:
    points.install()
    point, _, nth = sys.argv[1].partition(":")
    points.arm(point, "kill", int(nth or 1))
    from shmtensor.cli.main import make_app

    make_app()(sys.argv[2:], prog_name="shmtensor")


if __name__ == "__main__":
    main()
