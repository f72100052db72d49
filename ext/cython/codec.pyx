# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""Transformations of payloads for the codec wrapper: see codec.pyi for the contract."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stddef cimport size_t
from libcpp cimport bool as cbool

from core_status cimport Status


cdef extern from "kvstrata/planes.h" namespace "kvstrata" nogil:
    enum class PlanesPath(unsigned char):
        pass
    const int kPlanesPathCount
    const char* planes_path_name(PlanesPath path)
    cbool planes_path_supported(PlanesPath path)
    PlanesPath c_planes_path "kvstrata::planes_path"()
    Status planes_set_path(PlanesPath path)
    void planes_reset_path()
    void c_split_planes "kvstrata::split_planes"(void* planes, const void* bytes, size_t n)
    void c_join_planes "kvstrata::join_planes"(void* bytes, const void* planes, size_t n)


cdef int two_buffers(object out, object source, Py_buffer* to, Py_buffer* of) except -1:
    PyObject_GetBuffer(out, to, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(source, of, PyBUF_SIMPLE)
    except BaseException:
        PyBuffer_Release(to)
        raise
    cdef size_t a = <size_t>to.buf
    cdef size_t b = <size_t>of.buf
    if to.len != of.len or (a < b + <size_t>of.len and b < a + <size_t>to.len):
        PyBuffer_Release(to)
        PyBuffer_Release(of)
        raise ValueError(f"out: must be {of.len} bytes beside the source, has {to.len}")
    return 0


def split_planes(out, source):
    cdef Py_buffer to, of
    two_buffers(out, source, &to, &of)
    try:
        with nogil:
            c_split_planes(to.buf, of.buf, of.len)
    finally:
        PyBuffer_Release(&to)
        PyBuffer_Release(&of)


def join_planes(out, source):
    cdef Py_buffer to, of
    two_buffers(out, source, &to, &of)
    try:
        with nogil:
            c_join_planes(to.buf, of.buf, of.len)
    finally:
        PyBuffer_Release(&to)
        PyBuffer_Release(&of)


def planes_path():
    return planes_path_name(c_planes_path()).decode()


def planes_paths():
    return [
        planes_path_name(<PlanesPath>i).decode()
        for i in range(kPlanesPathCount)
        if planes_path_supported(<PlanesPath>i)
    ]


def set_planes_path(name):
    if name is None:
        planes_reset_path()
        return
    for i in range(kPlanesPathCount):
        if planes_path_name(<PlanesPath>i).decode() == name and planes_set_path(<PlanesPath>i).ok():
            return
    raise ValueError(f"name: this CPU has no such path {name!r}, only {', '.join(planes_paths())}")
