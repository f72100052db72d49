# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
"""Page tables of shared mappings (ext/core/src/memory/page_tables.h); see paging.pyi for the contract."""

from libc.stdint cimport uint8_t, uint64_t, uintptr_t

from core_status cimport Status
from kvstrata.native.status cimport CALL, raise_for


cdef extern from "memory/page_tables.h" namespace "kvstrata" nogil:
    Status c_map_present_pages "kvstrata::map_present_pages"(uint8_t*, uint64_t, uint64_t*) noexcept


def map_present_pages(address, length):
    """See paging.pyi."""
    cdef uintptr_t begin = address
    cdef uint64_t size = length
    cdef uint64_t mapped = 0
    cdef Status status
    with nogil:
        status = c_map_present_pages(<uint8_t*>begin, size, &mapped)
    raise_for(status, CALL)
    return mapped
