"""The one part of the build that pyproject.toml cannot say: a compiled module that may be left out."""

from setuptools import Extension, setup

HOT = "shmtensor/hot/"

setup(
    ext_modules=[
        Extension(
            "shmtensor.hot._hot",
            [HOT + "_hot.c"],
            depends=[
                HOT + f"{name}.h"
                for name in ("look", "bells", "outbox", "grip", "claim", "inlet", "batch", "group", "stream")
            ],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
