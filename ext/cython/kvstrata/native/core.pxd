# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# What the modules `connector` and `cuda` take from `core`: the C++ objects behind Python's, the conversion of items and
# results, and the exceptions for a Status.
from cpp cimport *


cdef enum Site:
    # The kind of call that returned a Status; it decides which class of exception is raised.
    CALL
    ITEMS  # detail(2) is the index of an item, or -1
    LANES
    RECORD
    POOL
    REGISTRY


cdef str message_of(const Status& status)
# Does nothing for a status that is ok. `where` is put before the message.
cdef int raise_for(const Status& status, Site site, str where=*) except -1
# As raise_for(), but for kIncompatible it raises a PoolFormatError with these facts.
cdef int raise_for_format(
    const Status& status, Site site, const char* field, uint64_t found, uint64_t expected
) except -1


cdef class RecordSpec:
    cdef CRecordSpec spec


cdef class CopyPlan:
    cdef shared_ptr[const CCopyPlan] plan

cdef int set_blocks(vector[uint32_t]& blocks, object ids, bint may_skip) except -1
cdef CopyKind kind_of(object kind) except *
cdef int set_items(vector[CopyItem]& out, CopyKind kind, object items) except -1
cdef list codes_of(const vector[CCopyOutcome]& outcomes)


# Native code that copies `Hold.held` keeps the extent, and can drop the hold without the GIL.
cdef class Hold:
    cdef shared_ptr[CHold] held


cdef class Pool:
    cdef shared_ptr[CPool] pool


cdef class ExtentsMap:
    cdef Mapping mapping
    cdef readonly size_t length
    cdef readonly bint writable
    cdef Py_ssize_t exports
