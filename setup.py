"""The part of the build that pyproject.toml cannot say: the compiled module, which may be left out.

With `SHMTENSOR_REQUIRE_NATIVE=1` it may not: wheels are built so.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

NATIVE = "shmtensor/native/"
FLAGS = ["-O2", "-pthread", "-Wall", "-Wextra"]

try:
    import numpy
except ImportError:  # without build isolation: that module fails to build, and the Python code does the work
    includes = []
else:
    includes = [numpy.get_include()]

setup(
    ext_modules=[
        Extension(
            "shmtensor.native._core",
            sorted(str(source) for source in Path(NATIVE).rglob("*.c")),
            depends=sorted(str(header) for header in Path(NATIVE).rglob("*.h")),
            include_dirs=includes,
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=os.environ.get("SHMTENSOR_REQUIRE_NATIVE", "") in ("", "0"),
        ),
    ]
)
