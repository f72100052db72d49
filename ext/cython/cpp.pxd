# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""The C++ core, as far as more than one file of the modules uses it; take it with `from cpp cimport *`."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "<span>" namespace "std" nogil:
    cdef cppclass ByteSpan "std::span<const std::uint8_t>":
        ByteSpan()
        ByteSpan(const uint8_t* data, size_t n)
    cdef cppclass U16Span "std::span<const std::uint16_t>":
        U16Span()
        U16Span(const uint16_t* data, size_t n)
    cdef cppclass U32Span "std::span<const std::uint32_t>":
        U32Span()
        U32Span(const uint32_t* data, size_t n)
    cdef cppclass U64Span "std::span<const std::uint64_t>":
        U64Span()
        U64Span(const uint64_t* data, size_t n)


cdef extern from "base/reason.h" namespace "kvstrata" nogil:
    enum class Reason(unsigned char):
        kNone

    const char* word_of(Reason) noexcept


cdef extern from "base/status.h" namespace "kvstrata" nogil:
    enum class StatusCode(unsigned short):
        kOk
        kBadArgument
        kNotFound
        kNoSpace
        kQueueFull
        kClosed
        kIncompatible
        kOsError

    cdef cppclass Status:
        Status()
        bint ok()
        StatusCode code()
        Reason reason()
        const char* message()
        int64_t detail(int i)

    const char* status_code_name(StatusCode) noexcept


cdef extern from "hash/crc32c.h" namespace "kvstrata" nogil:
    const char* c_crc32c_path "kvstrata::crc32c_path"()
    uint32_t c_crc32c "kvstrata::crc32c"(const void* data, size_t n, uint32_t crc)


cdef extern from "record/record.h" namespace "kvstrata" nogil:
    cdef cppclass Digest:
        unsigned char* data()
    cdef cppclass CRecordSpec "kvstrata::RecordSpec":
        Digest key
        Digest identity
        Digest slice_digest
        Digest parent_key
        uint32_t chunk_tokens
        uint64_t created_unix_ms
    struct Section:
        uint64_t offset
        uint32_t length
        uint32_t crc
    cdef cppclass CRecordHeader "kvstrata::RecordHeader":
        CRecordSpec spec
        uint64_t header_bytes
        uint64_t payload_bytes
        uint64_t stored_bytes
        uint32_t stored_crc
        uint32_t section_count
        uint64_t record_bytes()
        cbool plain()
        unsigned char* codecs "codecs.data()"
    cdef cppclass RecordEncoding:
        unsigned char* codecs "codecs.data()"
        uint64_t stored_bytes
        uint32_t stored_crc
    Status write_record_header(
        void* record, uint64_t length, const CRecordSpec& spec, Section* sections, uint64_t section_count)
    Status c_write_encoded_header "kvstrata::write_encoded_header"(
        void* record, uint64_t length, const CRecordSpec& spec, Section* sections, uint64_t section_count,
        const RecordEncoding& encoding)
    Status c_verify_stored_record "kvstrata::verify_stored_record"(
        const void* record, uint64_t length, const Digest* expected_key)
    Status c_record_bytes "kvstrata::record_bytes"(
        uint64_t section_count, uint64_t payload_bytes, uint64_t* out)
    Status c_seal_record "kvstrata::seal_record"(
        void* record, uint64_t length, const CRecordSpec& spec, const uint32_t* section_lengths,
        uint64_t section_count)
    Status read_record_header(
        const void* record, uint64_t length, CRecordHeader* header, Section* sections, size_t capacity)
    Status c_verify_record "kvstrata::verify_record"(
        const void* record, uint64_t length, const Digest* expected_key)


cdef extern from "codec/fp8.h" namespace "kvstrata" nogil:
    enum class Fp8Source(unsigned char):
        kBfloat16
        kFloat16
    cdef cppclass Fp8Shape:
        uint32_t blocks, groups, tokens, heads, dim


cdef extern from "copy/copy.h" namespace "kvstrata" nogil:
    struct CopySection:
        uint64_t base
        uint64_t block_stride
        uint32_t shape
    struct CopyDim:
        uint64_t count
        uint64_t stride
    cdef cppclass DimSpan "std::span<const kvstrata::CopyDim>":
        DimSpan(const CopyDim* data, size_t n)
    cdef cppclass BlockShape:
        @staticmethod
        Status create(DimSpan dims, uint64_t run_bytes, BlockShape* out)
        uint64_t run_bytes()
    cdef cppclass Rounding:
        Fp8Shape block
        Fp8Source type
    const uint32_t kSkipBlock
    cdef cppclass CCopyPlan "kvstrata::CopyPlan":
        @staticmethod
        Status create(vector[CopySection] sections, uint64_t num_blocks, vector[BlockShape] shapes,
                      shared_ptr[const CCopyPlan]* out)
        @staticmethod
        Status rounded(const CCopyPlan& plan, const Rounding& rounding, shared_ptr[const CCopyPlan]* out)
        const vector[BlockShape]& shapes()
        size_t section_count()
        uint64_t num_blocks()
        uint32_t section_bytes(size_t section, uint64_t n_blocks)
        Status payload_bytes(uint64_t n_blocks, uint64_t* out)
        Status record_bytes(uint64_t n_blocks, uint64_t* out)


cdef extern from "copy/engine.h" namespace "kvstrata" nogil:
    enum class CopyKind(unsigned char):
        kGather
        kScatter
    enum class CCopyOutcome "kvstrata::CopyOutcome"(unsigned char):
        pass
    cdef cppclass CopyItem:
        vector[uint32_t] blocks
        void* record
        uint64_t length
        CRecordSpec spec
    cdef cppclass CopyCompletion:
        uint64_t job_id
        vector[CCopyOutcome] outcomes
    cdef cppclass CCopyEngine "kvstrata::CopyEngine":
        @staticmethod
        Status create(int threads, size_t queue, shared_ptr[CCopyEngine]* out)
        int event_fd()
        Status submit(uint64_t job_id, CopyKind kind, shared_ptr[const CCopyPlan] plan,
                      vector[CopyItem] items)
        void completions(vector[CopyCompletion]* out)
        Status run(CopyKind kind, shared_ptr[const CCopyPlan] plan, vector[CopyItem] items,
                   vector[CCopyOutcome]* outcomes)
        cbool cancel(uint64_t job_id)
        void close()
    CCopyOutcome copy_outcome(const Status& status)


cdef inline int set_digest(Digest& digest, object value, str name) except -1:
    """Copies 32 bytes; TypeError or ValueError naming the argument."""
    if not isinstance(value, bytes):
        raise TypeError(f"{name}: must be bytes, not {type(value).__name__}")
    if PyBytes_GET_SIZE(value) != 32:
        raise ValueError(f"{name}: must be 32 bytes, not {PyBytes_GET_SIZE(value)}")
    memcpy(digest.data(), PyBytes_AS_STRING(value), 32)
    return 0


cdef extern from "copy/strided.h" namespace "kvstrata" nogil:
    struct StridedLoop:
        uint64_t count
        uint64_t source_stride
        uint64_t target_stride
    cdef cppclass StridedCopy:
        uint32_t source
        uint32_t loop_count
        uint64_t source_offset
        uint64_t target_offset
        uint64_t run_bytes
        StridedLoop* loops_data "loops.data" ()
    const size_t kMaxStridedLoops "kvstrata::StridedCopy::kMaxLoops"
    cdef cppclass ByteSpans "std::span<const std::span<const unsigned char>>":
        ByteSpans(const ByteSpan* data, size_t n)
    cdef cppclass WritableSpan "std::span<unsigned char>":
        WritableSpan(unsigned char* data, size_t n)
    cdef cppclass CopySpan "std::span<const kvstrata::StridedCopy>":
        CopySpan(const StridedCopy* data, size_t n)
    Status c_copy_strided "kvstrata::copy_strided"(CopySpan copies, ByteSpans sources, WritableSpan target)


cdef extern from "hash/sha256.h" namespace "kvstrata" nogil:
    const char* c_sha256_path "kvstrata::sha256_path"()
    cdef cppclass ChunkExtra:
        uint64_t chunk
        Digest bytes
    cdef cppclass ExtraSpan "std::span<const kvstrata::ChunkExtra>":
        ExtraSpan(const ChunkExtra* data, size_t n)
    cdef cppclass DigestSpan "std::span<const kvstrata::Digest>":
        DigestSpan(const Digest* start, size_t n)
        const Digest* data() noexcept
        size_t size() noexcept
    void c_chain_keys "kvstrata::chain_keys"(
        const Digest& start, U32Span tokens, size_t chunk_tokens, ExtraSpan extras, Digest* out)
    void c_storage_keys "kvstrata::storage_keys"(
        const Digest& root, DigestSpan chain, DigestSpan slices, Digest* out
    )


cdef extern from "pool/index.h" namespace "kvstrata" nogil:
    const uint64_t FLAG_HAS_L2 "kvstrata::kIndexFlagHasL2"
    const uint64_t FLAG_PROMISES "kvstrata::kIndexFlagPromises"
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
        const uint8_t* data() noexcept

    cdef cppclass CIndexReader "kvstrata::IndexReader":
        @staticmethod
        Status open(int, CIndexReader*, FormatMismatch*) noexcept
        size_t peek(const uint8_t*, size_t, size_t) noexcept
        size_t peek_windows(const uint8_t*, size_t, U32Span) noexcept
        uint64_t epoch() noexcept
        uint64_t heartbeat_age_ns() noexcept
        cbool has(uint64_t) noexcept
        uint64_t extents_bytes() noexcept
        PoolId pool_id() noexcept
        cbool is_open() noexcept
        void close() noexcept


cdef extern from "pool/changes.h" namespace "kvstrata" nogil:
    cdef enum class Change(unsigned char):
        pass

    cdef cppclass ChangeEntry:
        uint64_t tag
        uint16_t tier
        Change change

    cdef cppclass TierChanges:
        uint16_t tier
        cbool cleared
        vector[uint64_t] gone
        vector[uint64_t] came

    cdef cppclass ChangedTiers:
        ChangedTiers()
        uint64_t next
        vector[TierChanges] tiers

    cdef cppclass Changes:
        Status begin() noexcept
        void note_all(uint16_t, Change, const uint64_t*, size_t, size_t) noexcept
        uint64_t next() noexcept
        cbool read(uint64_t, size_t, vector[ChangeEntry]*) except +
        cbool read(uint64_t, size_t, ChangedTiers*) except +
        cbool wait(uint64_t) noexcept
        int fd() noexcept
        void drain() noexcept

cdef extern from "pool/pool.h" namespace "kvstrata" nogil:
    const size_t kMaxQuotas

    cdef cppclass CHold "kvstrata::Hold":
        CHold() noexcept
        cbool is_held() noexcept
        void drop() noexcept
        void uncount() noexcept
        const CKey& key() noexcept
        uint64_t offset() noexcept
        uint32_t length() noexcept
        uint32_t tenant() noexcept
        uint8_t* address() noexcept
        cbool is_reservation() noexcept

    cdef cppclass ExtentRecord:
        pass

    cdef cppclass PoolOptions:
        uint64_t extents_bytes
        uint64_t entry_capacity
        string policy
        uint32_t max_session_share
        double depth_cost
        string lessons

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
        double fragmentation
        const char* policy
        vector[ClassStats] classes
        vector[TenantStats] tenants

    cdef cppclass WordSpan "std::span<const char* const>":
        size_t size()
        const char* operator[](size_t)

    cdef cppclass PoolNumber "kvstrata::PoolNumber":
        const char* field
        const char* metric
        const char* kind
        const char* help
        size_t offset
        const char* label
        WordSpan words

    vector[PoolNumber] pool_numbers() noexcept

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

    cdef cppclass Forecast "kvstrata::Forecast":
        double factor, hits, seconds

    cdef cppclass TenantForecast "kvstrata::TenantForecast":
        uint32_t tenant
        cbool is_rest
        uint64_t bytes
        double part
        vector[Forecast] sizes

    cdef cppclass Forecasts "kvstrata::Forecasts":
        vector[Forecast] sizes
        vector[TenantForecast] tenants

    cdef cppclass RequestLog "kvstrata::RequestLog":
        void start(uint64_t) noexcept
        string take() except +

    cdef cppclass ShadowSums "kvstrata::ShadowSums":
        double chunks, hit_chunks, cost, hit_cost

    cdef cppclass CShadow "kvstrata::Shadow":
        CShadow(size_t, string, double, cbool, size_t, cbool) except +
        cbool replay(string) except +
        const ShadowSums& sums() noexcept

    cdef cppclass CPool "kvstrata::Pool":
        RequestLog& request_log() noexcept
        void missed(const uint8_t*, size_t, size_t, uint32_t) noexcept
        size_t hint(const uint8_t*, size_t, uint8_t) noexcept
        void has(const uint8_t*, size_t, uint8_t*) noexcept
        cbool learn() noexcept
        Forecasts forecasts() noexcept
        string lessons() noexcept
        @staticmethod
        cbool are_lessons(string) noexcept
        void set_model(const CKey&, uint8_t) noexcept
        void set_cost(uint8_t, double) noexcept
        void set_time(uint64_t) noexcept
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
        Status lease(
            const uint8_t*, size_t, U32Span, U32Span, const uint8_t*, cbool, LeaseResult*, cbool, size_t, uint32_t
        ) noexcept
        Status lease_chain(
            CChainKeys&, U32Span, U32Span, const uint8_t*, cbool, LeaseResult*, size_t, uint32_t
        ) noexcept
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
        Status hold_batch(const uint8_t*, size_t, uint64_t, CHold*, uint8_t*) noexcept
        uint64_t counted_bytes() noexcept
        cbool is_tail(const CKey&) noexcept
        cbool is_reserved(const CKey&) noexcept
        uint64_t remove(const uint8_t*, size_t) noexcept
        ClearResult clear(int64_t) noexcept
        ClearedInUse cleared_in_use(int64_t) noexcept
        uint64_t ready_tags(uint64_t, uint64_t, vector[uint64_t]*) noexcept
        cbool set_quota(uint32_t, int64_t) noexcept
        vector[CKey] take_verified() noexcept
        Changes& changes() noexcept
        PoolStats stats() noexcept
        void heartbeat() noexcept
        void set_flag(uint64_t, cbool) noexcept
        Status prefault_start(uint32_t) noexcept
        uint64_t retry_missing() noexcept
        Prefault& prefault() noexcept
        void close() noexcept


cdef extern from "pool/batch.h" namespace "kvstrata" nogil:
    cdef cppclass CLoadRequest "kvstrata::LoadRequest":
        const uint8_t* keys
        size_t n_keys
        vector[uint8_t] parents
        vector[uint64_t] room_bytes
        Digest identity
        uint32_t tenant
        cbool tail

    cdef enum class ReserveOutcome(unsigned char):
        kReserved

    cdef cppclass LoadRefusal:
        uint32_t chunk
        ReserveOutcome why

    cdef cppclass CLoadBatch "kvstrata::LoadBatch":
        CLoadBatch() noexcept
        Status reserve(shared_ptr[CPool], const CLoadRequest&, U32Span) noexcept
        Status finish(const uint8_t*, uint8_t*) noexcept
        vector[uint32_t] numbers
        vector[CHold] holds
        vector[uint32_t] present
        LoadRefusal refusal

cdef extern from "kvstrata/connector.h" namespace "kvstrata" nogil:
    const char* connector_capsule_name

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
        const char* reason

    cdef cppclass PutItem:
        Digest key
        const uint8_t* bytes
        uint32_t length
        BytesHold hold
        PutStatus status
        const char* reason

    cdef cppclass LoadItem:
        Digest key
        uint8_t* bytes
        uint32_t length
        BytesHold hold
        LoadStatus status
        const char* reason

    cdef cppclass DeleteItem:
        Digest key
        cbool removed

    cdef cppclass ConnectorCapabilities:
        cbool persistent, shared, can_delete, can_clear, wants_registered_memory, exists_is_quick
        cbool lists
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
        string open(const ConnectorContext&) except +
        uint64_t list(uint64_t, size_t, vector[Digest]*) noexcept
        uint64_t clear() noexcept
        ConnectorUsage usage() noexcept
        void close() noexcept
