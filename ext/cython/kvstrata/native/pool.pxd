# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#
# What other extensions may cimport: the C++ hold behind a Python one, so that native code can keep an extent
# alive (copy `Hold.held`) and drop it without the GIL.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr


cdef extern from "kvstrata/index.h" namespace "kvstrata" nogil:
    cdef cppclass CKey "kvstrata::Key":
        @staticmethod
        CKey load(const void*) noexcept
        void store(void*) noexcept


cdef extern from "kvstrata/pool.h" namespace "kvstrata" nogil:
    cdef cppclass CHold "kvstrata::Hold":
        CHold() noexcept
        cbool is_held() noexcept
        void drop() noexcept
        const CKey& key() noexcept
        uint64_t offset() noexcept
        uint32_t length() noexcept
        uint32_t generation() noexcept
        uint32_t tenant() noexcept
        uint8_t* address() noexcept
        cbool is_reservation() noexcept


cdef class Hold:
    cdef shared_ptr[CHold] held
