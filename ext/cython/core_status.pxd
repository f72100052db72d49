# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/include/kvstrata/status.h."""

from libc.stdint cimport int64_t


cdef extern from "kvstrata/status.h" namespace "kvstrata" nogil:
    enum class StatusCode(unsigned short):
        kOk
        kBadArgument
        kOutOfRange
        kNotFound
        kExists
        kNoSpace
        kQueueFull
        kBusy
        kClosed
        kCancelled
        kTimedOut
        kCorrupt
        kStale
        kIncompatible
        kRefused
        kUnsupported
        kOsError
        kInternal

    cdef cppclass Status:
        Status()
        bint ok()
        StatusCode code()
        const char* message()
        int64_t detail(int i)
