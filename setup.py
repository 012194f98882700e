"""The one part of the build that pyproject.toml cannot say: a compiled module that may be left out."""

from pathlib import Path

from setuptools import Extension, setup

HOT = "shmtensor/hot/"

setup(
    ext_modules=[
        Extension(
            "shmtensor.hot._hot",
            [HOT + "_hot.c"],
            depends=sorted(str(header) for header in Path(HOT).glob("*.h")),
            extra_compile_args=["-O2", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
