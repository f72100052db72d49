"""Compiles the native code for `setup.py`, the C++ tests (`ext/core/Makefile`) and benchmarks.

`cache` keeps compiled files, `steps` compiles one file, `modules` builds the package's extension modules, `cuda` builds
the GPU kernels, and `ucx` finds UCX's headers. These modules use only the standard library, and `modules` also Cython.
"""
