# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False, annotation_typing=False
"""The native half of the server and its clients: keys, records, copies, codecs, the pool, the registry.

Each part is headed by what holds for it.
"""

import enum
import os
from typing import NamedTuple, TypedDict

from kvstrata.errors import MediumError, SegmentError

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cython.operator cimport dereference
from libc.stdint cimport uintptr_t
from libc.string cimport memcpy
from libcpp.memory cimport make_shared
from libcpp.utility cimport move

from arguments cimport spans_of, spans_or_zeros, whole, whole32
from buffers cimport BorrowedBuffer, borrow
from cpp cimport *


cdef enum:
    KEY_BYTES = 32

# Without it nobody makes an object around nothing, by `__new__` either.
cdef object MADE_HERE = object()

include "core/status.pxi"
include "core/keys.pxi"
include "core/record.pxi"
include "core/copying.pxi"
include "core/codec.pxi"
include "core/pool.pxi"
include "core/pool_stats.pxi"
include "core/views.pxi"
include "core/registry.pxi"
