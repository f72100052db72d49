"""Compiles the native code for `setup.py`, the C++ tests (`ext/core/Makefile`) and benchmarks.

`build` runs steps and keeps their products, and `native` says what is built. Both use only the standard library, and
run Cython as a program.
"""
