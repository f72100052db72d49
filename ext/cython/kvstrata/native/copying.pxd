# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# For the GPU copy engine (cuda.pyx): the C++ plan behind a Python plan, and the conversion of items and results.
from libc.stdint cimport uint32_t
from libcpp.memory cimport shared_ptr
from libcpp.vector cimport vector

from core_copying cimport CCopyPlan, CopyItem, CopyKind, CopyResult

cdef double LONGEST_WAIT_S

cdef class CopyPlan:
    cdef shared_ptr[const CCopyPlan] plan

cdef int set_blocks(vector[uint32_t]& blocks, object ids, bint may_skip) except -1
cdef CopyKind kind_of(object kind) except *
cdef int set_items(vector[CopyItem]& out, CopyKind kind, object items) except -1
cdef list codes_of(const vector[CopyResult]& results)
