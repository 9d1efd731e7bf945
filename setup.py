"""What `pyproject.toml` cannot say yet: the compiled loops, without which everything works as well."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        # Where there is no compiler, or no headers of Python, it is left out.
        Extension(
            "lowwater.engine._fast",
            ["engine/_fast.c", "engine/_fast_frames.c", "engine/_fast_hashes.c", "engine/_fast_merging.c"],
            depends=["engine/_fast.h"],
            # What is shared by these files is nobody else's.
            extra_compile_args=["-O3", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
