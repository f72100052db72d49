# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# What the GPU's copy engine (cuda.pyx) takes from copying.pyx: the C++ plan behind a Python one, and how items and
# results cross the border.
from libc.stdint cimport uint32_t, uint64_t
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from core_copying cimport CCopyPlan, CopyItem, CopyKind, CopyResult, CRecordSpec
from core_status cimport Status

cdef double LONGEST_WAIT_S

cdef class CopyPlan:
    cdef shared_ptr[const CCopyPlan] plan

cdef class RecordSpec:
    cdef CRecordSpec spec

cdef int check(const Status& status) except -1
cdef int check_job(const Status& status) except -1
cdef uint64_t whole(object value, str name) except? 0xffffffffffffffff
cdef int set_blocks(vector[uint32_t]& blocks, object ids, bint may_skip) except -1
cdef CopyKind kind_of(object kind) except *
cdef int set_items(vector[CopyItem]& out, CopyKind kind, object items) except -1
cdef list codes_of(const vector[CopyResult]& results)
