# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Work on batches of keys and values: see batches.pyi for the contract."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t
from libc.string cimport memcpy


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t, Py_UCS4)
    void* PyUnicode_DATA(object)
    bint PyUnicode_IS_ASCII "PyUnicode_IS_COMPACT_ASCII"(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)


cdef enum:
    KEY_BYTES = 32


cdef uint16_t[256] PAIRS  # of hexadecimal digits
for _byte in range(256):
    _digits = b"%02x" % _byte
    memcpy(&PAIRS[<int>_byte], PyBytes_AS_STRING(_digits), 2)


cdef int _copy_key(char* place, object key) except -1:
    if not PyBytes_CheckExact(key):
        key = bytes(key)
    if PyBytes_GET_SIZE(key) != KEY_BYTES:
        raise ValueError(f"key: must have {KEY_BYTES} bytes, not {len(key)}")
    memcpy(place, PyBytes_AS_STRING(key), KEY_BYTES)
    return 0


def names_of(str prefix not None, keys):
    cdef Py_ssize_t prefix_chars = PyUnicode_GET_LENGTH(prefix)
    cdef char[KEY_BYTES] key
    cdef char* place
    cdef int i
    cdef list names = []
    if not PyUnicode_IS_ASCII(prefix):
        raise ValueError(f"prefix: must be ASCII, found {prefix!r}")
    for value in keys:
        _copy_key(key, value)
        name = PyUnicode_New(prefix_chars + 2 * KEY_BYTES, 127)
        place = <char*>PyUnicode_DATA(name)
        memcpy(place, PyUnicode_DATA(prefix), prefix_chars)
        place += prefix_chars
        for i in range(KEY_BYTES):
            memcpy(place + 2 * i, &PAIRS[<uint8_t>key[i]], 2)
        names.append(name)
    return names


def types_of(values):
    cdef set types = set()
    cdef object last = None
    for value in values:
        if type(value) is not last:  # nearly all values of a batch have one type
            last = type(value)
            types.add(last)
    return types
