# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# The other modules raise exceptions for a Status of the core only through these functions.
from libc.stdint cimport uint64_t

from core_status cimport Status


cdef enum Site:
    # The kind of call that returned a Status; it decides which class of exception is raised (status.pyi).
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
