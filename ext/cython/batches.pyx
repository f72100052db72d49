# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Packs batches of keys, and of outcomes of `exists`, into bytes and back: see batches.pyi for the contract."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t
from libc.string cimport memcmp, memcpy
from libcpp.string cimport string


cdef extern from "Python.h":
    object PyUnicode_New(Py_ssize_t, Py_UCS4)
    void* PyUnicode_DATA(object)
    bint PyUnicode_IS_ASCII "PyUnicode_IS_COMPACT_ASCII"(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)


cdef enum:
    KEY_BYTES = 32
    FOUND_BYTES = 6  # u8 presence, u32 record bytes, u8 length of the reason
    PRESENCES = 3


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


def pack_keys(keys):
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, len(keys) * KEY_BYTES)
    cdef char* place = PyBytes_AS_STRING(packed)
    for key in keys:
        _copy_key(place, key)
        place += KEY_BYTES
    return packed


def split_keys(const unsigned char[::1] packed not None):
    cdef Py_ssize_t count = packed.shape[0] // KEY_BYTES
    cdef Py_ssize_t i
    cdef const char* begin = <const char*>&packed[0] if count else NULL
    if packed.shape[0] % KEY_BYTES:
        raise ValueError(f"keys: must be a multiple of {KEY_BYTES} bytes, not {packed.shape[0]}")
    return [begin[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(count)]


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


def pack_found(outcomes, word):
    cdef string rows
    cdef size_t at = 0
    cdef uint8_t presence, reason_bytes = 0
    cdef uint32_t record_bytes
    cdef bytes reason
    last = object()  # equal to no outcome
    rows.reserve(len(outcomes) * FOUND_BYTES)
    for found in outcomes:
        if found is last:  # the usual case, because equal answers share one object
            rows.append(rows, at, FOUND_BYTES + reason_bytes)
            continue
        at = rows.size()
        last = found
        presence, record_bytes, text = found
        reason = word(text) if text else b""
        if PyBytes_GET_SIZE(reason) > 255:
            raise ValueError(f"reason: must have at most 255 bytes, not {len(reason)}")
        reason_bytes = <uint8_t>PyBytes_GET_SIZE(reason)
        rows.append(<const char*>&presence, 1)
        rows.append(<const char*>&record_bytes, 4)
        rows.append(<const char*>&reason_bytes, 1)
        rows.append(PyBytes_AS_STRING(reason), reason_bytes)
    return PyBytes_FromStringAndSize(rows.data(), rows.size())


def read_found(const unsigned char[::1] rows not None, Py_ssize_t count, Py_ssize_t max_reason_bytes, make):
    cdef list made = []
    cdef list last = [None] * PRESENCES
    cdef Py_ssize_t[PRESENCES] last_at = [-1, -1, -1]
    cdef Py_ssize_t left = rows.shape[0]
    cdef Py_ssize_t row_bytes, at = 0
    cdef const unsigned char* row
    cdef uint32_t record_bytes
    cdef int presence
    for _ in range(count):
        if left - at < FOUND_BYTES:
            raise ValueError(f"outcomes: {left} bytes are too few for {count} rows")
        row = &rows[at]
        presence = row[0]
        row_bytes = FOUND_BYTES + row[5]
        if presence >= PRESENCES:
            raise ValueError(f"presence: must be below {PRESENCES}, not {presence}")
        if row[5] > max_reason_bytes or left - at < row_bytes:
            raise ValueError(f"reason: {row[5]} bytes are more than {max_reason_bytes}, or leave the rows")
        if (
            last_at[presence] < 0
            or rows[last_at[presence] + 5] != row[5]
            or memcmp(&rows[last_at[presence]], row, row_bytes) != 0
        ):
            memcpy(&record_bytes, row + 1, 4)
            reason = (<const char*>row)[FOUND_BYTES:row_bytes].decode()
            last[presence] = make(presence, record_bytes, reason)
            last_at[presence] = at
        made.append(last[presence])
        at += row_bytes
    if at != left:
        raise ValueError(f"outcomes: {left - at} bytes too many after {count} rows")
    return made
