# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/src/base/status.h and base/reason.h."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t


cdef extern from "base/reason.h" namespace "kvstrata" nogil:
    enum class Reason(unsigned char):
        kNone

    struct ReasonRow:
        Reason reason
        const char* word
        bint retryable
        bint blames_medium
        const char* meaning

    const ReasonRow* kReasons
    size_t kReasonCount "std::size(kvstrata::kReasons)"
    const char* word_of(Reason) noexcept


cdef extern from "base/status.h" namespace "kvstrata" nogil:
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
        Reason reason()
        const char* message()
        int64_t detail(int i)

    const char* status_code_name(StatusCode) noexcept
