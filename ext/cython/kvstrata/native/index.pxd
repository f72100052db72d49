# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# For lent.pyx: the mapping that contains the extent of a lent hold.
from core_pool cimport Mapping


cdef class ExtentsMap:
    cdef Mapping mapping
    cdef readonly size_t length
    cdef readonly bint writable
    cdef Py_ssize_t exports
