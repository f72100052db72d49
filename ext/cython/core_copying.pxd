# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""The headers of ext/core/src/{hash,record,codec,copy} that several modules use, as far as they use them."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp cimport bool as cbool
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.vector cimport vector

from core_status cimport Status


cdef extern from "hash/crc32c.h" namespace "kvstrata" nogil:
    const char* crc32c_path()
    uint32_t crc32c(const void* data, size_t n, uint32_t crc)


cdef extern from "record/record.h" namespace "kvstrata" nogil:
    cdef cppclass Digest:
        unsigned char* data()
    const uint32_t kMaxSections
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
        Status check()
        size_t numbers()
        size_t scales()


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
    cdef cppclass BlockSpan "std::span<const std::uint32_t>":
        BlockSpan(const uint32_t* data, size_t n)
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
    Status c_gather_record "kvstrata::gather_record"(
        const CCopyPlan& plan, BlockSpan blocks, void* record, uint64_t length, const CRecordSpec& spec)
    Status c_scatter_record "kvstrata::scatter_record"(
        const CCopyPlan& plan, BlockSpan blocks, const void* record, uint64_t length,
        const CRecordSpec& wanted)


cdef extern from "<chrono>" namespace "std::chrono" nogil:
    cdef cppclass nanoseconds:
        nanoseconds(int64_t count)


cdef extern from "copy/engine.h" namespace "kvstrata" nogil:
    enum class CopyKind(unsigned char):
        kGather
        kScatter
    enum class CCopyOutcome "kvstrata::CopyOutcome"(unsigned char):
        kOk
        kStale
        kCorrupt
        kMismatch
        kUnverified
        kCancelled
        kFailed
    cdef cppclass CopyItem:
        vector[uint32_t] blocks
        void* record
        uint64_t length
        CRecordSpec spec
    struct CopyResult:
        CCopyOutcome outcome
        int32_t section
    cdef cppclass CopyCompletion:
        uint64_t job_id
        vector[CopyResult] results
    cdef cppclass CCopyEngine "kvstrata::CopyEngine":
        @staticmethod
        Status create(int threads, size_t queue, unique_ptr[CCopyEngine]* out)
        int event_fd()
        Status submit(uint64_t job_id, CopyKind kind, shared_ptr[const CCopyPlan] plan,
                      vector[CopyItem] items)
        Status completions(vector[CopyCompletion]* out)
        Status run(CopyKind kind, shared_ptr[const CCopyPlan] plan, vector[CopyItem] items,
                   vector[CopyResult]* results)
        cbool wait(uint64_t job_id, nanoseconds timeout)
        cbool cancel(uint64_t job_id)
        void drain()
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
    cdef cppclass ByteSpan "std::span<const unsigned char>":
        ByteSpan(const unsigned char* data, size_t n)
    cdef cppclass ByteSpans "std::span<const std::span<const unsigned char>>":
        ByteSpans(const ByteSpan* data, size_t n)
    cdef cppclass WritableSpan "std::span<unsigned char>":
        WritableSpan(unsigned char* data, size_t n)
    cdef cppclass CopySpan "std::span<const kvstrata::StridedCopy>":
        CopySpan(const StridedCopy* data, size_t n)
    Status c_copy_strided "kvstrata::copy_strided"(CopySpan copies, ByteSpans sources, WritableSpan target)
