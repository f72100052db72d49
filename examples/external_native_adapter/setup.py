"""Compiles the connector against the headers of the installed kvstrata."""

from setuptools import Extension, setup

from kvstrata.cli import native_include_dir

setup(
    ext_modules=[
        Extension(
            "kvstrata_flat_files._connector",
            ["src/kvstrata_flat_files/connector.cpp"],
            include_dirs=[str(native_include_dir())],
            extra_compile_args=["-std=c++20", "-O2", "-Wall", "-Wextra"],
            language="c++",
        )
    ]
)
