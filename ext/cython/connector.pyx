# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, annotation_typing=False
"""Lanes, and storage media in C++ whose calls run in them."""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport (
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyCapsule_New,
    PyCapsule_SetDestructor,
    PyCapsule_SetName,
)
from cpython.ref cimport PyObject
from libc.string cimport memcpy
from libcpp.utility cimport move

from buffers cimport BorrowedBuffer
from cpp cimport *
from kvstrata.native.core cimport LANES, Hold, raise_for

include "connector/connector.pxi"
include "connector/lanes.pxi"
include "connector/media.pxi"
