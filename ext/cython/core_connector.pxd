# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/include/kvstrata/connector.h, as far as connector.pyx and lanes.pyx use it."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "kvstrata/connector.h" namespace "kvstrata" nogil:
    const char* connector_capsule_name

    cdef cppclass Digest:
        unsigned char* data()

    # These enumerations are converted to numbers, so their values are not named here.
    enum class Presence(unsigned char):
        pass
    enum class PutStatus(unsigned char):
        pass
    enum class LoadStatus(unsigned char):
        pass
    enum class Quiesce(unsigned char):
        kNever

    cdef cppclass BytesHold:
        pass

    cdef cppclass ExistsItem:
        Digest key
        Presence presence
        uint32_t record_bytes
        const char* reason

    const uint32_t kHeadBytes

    cdef cppclass HeadItem:
        Digest key
        uint32_t length
        uint8_t* bytes

    cdef cppclass PutItem:
        PutStatus status
        const char* reason

    cdef cppclass LoadItem:
        LoadStatus status
        const char* reason

    cdef cppclass DeleteItem:
        Digest key
        cbool removed

    cdef cppclass ConnectorCapabilities:
        cbool persistent, shared, can_delete, can_clear, wants_registered_memory, exists_is_quick
        cbool has_heads, lists
        Quiesce quiesce
        uint32_t max_batch, items_per_piece

    cdef cppclass ConnectorContext:
        ConnectorContext() except +
        string instance_id
        uint8_t* region
        uint64_t region_bytes

    cdef cppclass ConnectorUsage:
        uint64_t used_bytes, capacity_bytes, records

    cdef cppclass ConnectorNote:
        cbool warning
        string text

    cdef cppclass ConnectorCount:
        const char* name
        uint64_t value

    cdef cppclass CConnector "kvstrata::Connector":
        ConnectorCapabilities capabilities() noexcept
        cbool ready() noexcept
        void take_notes(vector[ConnectorNote]*) noexcept
        void counts(vector[ConnectorCount]*) noexcept
