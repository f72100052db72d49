# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/src/pool, as far as pool.pyx, index.pyx and lent.pyx use it."""

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector

from core_copying cimport Digest
from core_hashing cimport DigestSpan
from core_status cimport Status


cdef extern from *:
    """
    #include <span>
    namespace kvstrata_cython {
    using U32Span = std::span<const std::uint32_t>;
    inline U32Span u32_span(const std::uint32_t* data, std::size_t size) { return U32Span(data, size); }
    using U64Span = std::span<const std::uint64_t>;
    inline U64Span u64_span(const std::uint64_t* data, std::size_t size) { return U64Span(data, size); }
    template <typename T>
    inline const char* id_bytes(T span) { return reinterpret_cast<const char*>(span.data()); }
    }
    """
    cdef cppclass U32Span "kvstrata_cython::U32Span":
        U32Span() noexcept
    U32Span u32_span "kvstrata_cython::u32_span"(const uint32_t*, size_t) noexcept nogil
    cdef cppclass U64Span "kvstrata_cython::U64Span":
        U64Span() noexcept
    U64Span u64_span "kvstrata_cython::u64_span"(const uint64_t*, size_t) noexcept nogil
    const char* id_bytes "kvstrata_cython::id_bytes"[T](T) noexcept nogil


cdef extern from "pool/index.h" namespace "kvstrata" nogil:
    cdef cppclass CKey "kvstrata::Key":
        @staticmethod
        CKey load(const void*) noexcept
        void store(void*) noexcept

    cdef cppclass FormatMismatch:
        const char* field
        uint64_t found
        uint64_t expected

    cdef cppclass Mapping:
        @staticmethod
        Status map(int, uint64_t, cbool, cbool, Mapping*) noexcept
        void* address() noexcept
        void reset() noexcept

    cdef cppclass PoolId "std::span<const std::uint8_t, 16>":
        pass

    cdef cppclass CIndexReader "kvstrata::IndexReader":
        @staticmethod
        Status open(int, CIndexReader*, FormatMismatch*) noexcept
        size_t peek(const uint8_t*, size_t, size_t) noexcept
        size_t peek_windows(const uint8_t*, size_t, U32Span) noexcept
        uint64_t epoch() noexcept
        uint64_t heartbeat_age_ns() noexcept
        cbool has_l2() noexcept
        uint64_t extents_bytes() noexcept
        PoolId pool_id() noexcept
        cbool is_open() noexcept
        void close() noexcept


cdef extern from "pool/pool.h" namespace "kvstrata" nogil:
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


cdef extern from "pool/pool.h" namespace "kvstrata" nogil:
    cdef size_t kMaxBatchKeys

    cdef cppclass ExtentRecord:
        pass

    cdef enum class EventKind(unsigned char):
        kEvicted

    cdef cppclass CEvent "kvstrata::Event":
        EventKind kind
        CKey key
        uint64_t bytes

    cdef cppclass PoolOptions:
        uint64_t extents_bytes
        uint64_t entry_capacity
        string policy
        double watermark
        double watermark_ratio
        uint32_t max_session_share

    cdef cppclass Id16 "std::array<std::uint8_t, 16>":
        uint8_t* data() noexcept

    cdef cppclass RowInfo:
        uint32_t row
        Id16 session
        Id16 group
        uint64_t pid
        cbool old
        cbool registers_memory

    cdef cppclass ClassStats:
        uint64_t extent_bytes
        uint32_t used
        uint32_t capacity

    cdef cppclass TenantStats:
        uint32_t tenant
        uint64_t bytes
        int64_t quota_bytes

    cdef cppclass PoolStats:
        uint64_t entries[5]
        uint64_t bytes[5]
        uint64_t extents_bytes, used_bytes, slab_bytes, unusable_bytes, largest_allocatable_bytes
        uint64_t leased_bytes, pinned_bytes, blocked_bytes
        uint64_t lease_tickets, reservations, holds
        uint64_t evicted_entries, evicted_bytes, evicted_by_policy, evicted_by_window, evicted_by_quota
        uint64_t evicted_by_watermark
        uint64_t cleared_entries, corrupt_entries, inserted_entries, inserted_bytes, quarantined_entries
        uint64_t refused[11]
        uint64_t leases_trimmed, bad_records
        uint64_t adopted_entries, adoption_dropped
        uint64_t events_lost, prefaulted_bytes
        uint64_t tail_entries, tail_record_bytes, tail_extent_bytes
        uint64_t backed_bytes, missing_bytes, rows_capacity
        uint64_t entry_capacity, rows_claimed
        double fragmentation
        const char* policy
        vector[ClassStats] classes
        vector[TenantStats] tenants

    cdef cppclass ClearResult "kvstrata::ClearResult":
        uint64_t dropped, kept

    cdef cppclass ClearedInUse "kvstrata::ClearedInUse":
        uint64_t held, leased

    cdef cppclass LeaseResult "kvstrata::LeaseResult":
        uint64_t ticket
        uint64_t n_chunks
        uint64_t unverified
        uint64_t short_bytes
        cbool exceeded
        vector[ExtentRecord] extents

    cdef cppclass CChainKeys "kvstrata::ChainKeys":
        CChainKeys(const Digest&, DigestSpan, DigestSpan, U32Span, size_t) except +
        DigestSpan whole() noexcept

    cdef cppclass ReserveRequest "kvstrata::ReserveRequest":
        const uint8_t* keys
        size_t n_keys
        const uint8_t* parent
        uint64_t record_bytes
        cbool tail
        uint64_t extent_bytes
        uint32_t row
        const uint8_t* identity
        uint32_t tenant

    cdef cppclass ReserveResult "kvstrata::ReserveResult":
        uint64_t ticket
        vector[uint8_t] outcomes
        vector[ExtentRecord] extents

    cdef cppclass Prefault:
        uint64_t done_bytes() noexcept
        int error() noexcept

    cdef cppclass CPool "kvstrata::Pool":
        @staticmethod
        Status create(int, int, const PoolOptions&, shared_ptr[CPool]*) noexcept
        @staticmethod
        Status adopt(int, int, const PoolOptions&, shared_ptr[CPool]*, FormatMismatch*) noexcept
        uint64_t epoch() noexcept
        PoolId pool_id() noexcept
        uint64_t extents_bytes() noexcept
        uint8_t* extents_address() noexcept
        Status claim_row(const uint8_t*, const uint8_t*, uint64_t, cbool, uint32_t*) noexcept
        vector[RowInfo] rows() noexcept
        Status row_gone(uint32_t) noexcept
        Status row_stranded(uint32_t, uint64_t*) noexcept
        Status row_quiesced(uint32_t) noexcept
        size_t peek(const uint8_t*, size_t, size_t) noexcept
        size_t peek_windows(const uint8_t*, size_t, U32Span) noexcept
        Status lease(const uint8_t*, size_t, U32Span, U32Span, const uint8_t*, LeaseResult*) noexcept
        Status lease_chain(CChainKeys&, U32Span, U32Span, const uint8_t*, LeaseResult*) noexcept
        cbool release(uint64_t, int64_t) noexcept
        size_t leases_to_end(U64Span, uint64_t) noexcept
        Status verify(const uint8_t*, size_t, uint64_t*, uint64_t*) noexcept
        Status verify_next(uint64_t, uint64_t*) noexcept
        Status mark_bad(const CKey&, const uint8_t*, cbool*) noexcept
        Status reserve(const ReserveRequest&, ReserveResult*) noexcept
        Status commit(uint64_t, U32Span, cbool, uint8_t*) noexcept
        uint64_t abort(uint64_t, U32Span, cbool) noexcept
        Status hold(const CKey&, const uint8_t*, CHold*) noexcept
        Status hold_reserved(uint64_t, uint64_t, CHold*) noexcept
        cbool is_tail(const CKey&) noexcept
        cbool is_reserved(const CKey&) noexcept
        uint64_t remove(const uint8_t*, size_t) noexcept
        ClearResult clear(int64_t) noexcept
        ClearedInUse cleared_in_use(int64_t) noexcept
        uint64_t ready_tags(uint64_t, uint64_t, vector[uint64_t]*) noexcept
        void set_quota(uint32_t, int64_t) noexcept
        uint64_t evict_to_watermark() noexcept
        vector[CKey] victims_preview(uint64_t) noexcept
        vector[CEvent] take_events(uint64_t*) noexcept
        PoolStats stats() noexcept
        void heartbeat() noexcept
        void set_has_l2(cbool) noexcept
        Status prefault_start(uint32_t) noexcept
        uint64_t retry_missing() noexcept
        Prefault& prefault() noexcept
        void close() noexcept
        cbool is_closed() noexcept
        Status validate() noexcept
