"""A process in a container: runs the Python code that the test sends, line by line, and answers with JSON.

`python -m tests.containers.role [POINT NTH]`: it kills itself when it comes by that crash point so many times.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(crash: list[str]) -> None:
    if crash:
        from ..faults import points

        points.install()
        points.arm(crash[0], "kill", int(crash[1]))
    import numpy as np

    import shmtensor

    scope: dict[str, Any] = {"np": np, "shmtensor": shmtensor}
    for line in sys.stdin:
        code = json.loads(line)
        try:
            try:
                found = eval(compile(code, "<told>", "eval"), scope)
            except SyntaxError:
                exec(compile(code, "<told>", "exec"), scope)
                found = None
            answer = ["ok", found]
        except Exception as error:
            answer = [type(error).__name__, str(error)]
        sys.stdout.write(json.dumps(answer, default=repr) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
