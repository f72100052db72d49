# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""Copies between engine blocks and records, and the records themselves: see copying.pyi for the contract."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLong
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.memory cimport shared_ptr, unique_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from core_copying cimport (
    BlockShape,
    BlockSpan,
    ByteSpan,
    ByteSpans,
    CCopyEngine,
    CCopyOutcome,
    CCopyPlan,
    CopyCompletion,
    CopyDim,
    CopyItem,
    CopyKind,
    CopyResult,
    CopySection,
    CopySpan,
    CRecordHeader,
    CRecordSpec,
    Crc32cPath,
    Digest,
    DimSpan,
    Section,
    StoreHint,
    StridedCopy,
    StridedLoop,
    WritableSpan,
    c_copy_strided,
    c_gather_record,
    c_record_bytes,
    c_scatter_record,
    c_seal_record,
    c_verify_record,
    c_verify_stored_record,
    copy_crc32c,
    copy_outcome,
    kCrc32cPathCount,
    kMaxSections,
    kMaxStridedLoops,
    kSkipBlock,
    nanoseconds,
    read_record_header,
    RecordEncoding,
    set_digest,
    c_write_encoded_header,
    write_record_header,
)
from core_copying cimport crc32c as core_crc32c
from core_copying cimport crc32c_path as core_crc32c_path
from core_copying cimport crc32c_path_name, crc32c_path_supported, crc32c_reset_path
from core_copying cimport crc32c_set_path
from core_status cimport Status, StatusCode

import enum
from collections import namedtuple

from kvstrata.errors import KvstrataError

# Below this many bytes giving up the GIL costs more than the work.
cdef size_t SHORT_BYTES = 16384
LONGEST_WAIT_S = 31_536_000.0


class CopyOutcome(enum.IntEnum):
    OK = 0
    STALE = 1
    CORRUPT = 2
    MISMATCH = 3
    UNVERIFIED = 4
    CANCELLED = 5
    FAILED = 6


class RecordError(KvstrataError):
    code = "bad_record"


RecordHeader = namedtuple(
    "RecordHeader",
    "key identity slice_digest parent_key chunk_tokens created_unix_ms header_bytes payload_bytes "
    "stored_bytes stored_crc codecs crc_pending sections",
    module=__name__,
)


cdef str message_of(const Status& status):
    cdef str text = status.message().decode()
    cdef list parts = []
    if status.detail(0) or status.detail(1):
        parts.append(f"got {status.detail(0)}")
    if status.detail(1):
        parts.append(f"limit {status.detail(1)}")
    if status.detail(2) > 0:
        parts.append(f"at index {status.detail(2)}")
    return f"{text} ({', '.join(parts)})" if parts else text


cdef int check(const Status& status) except -1:
    """Raises for a status that is not ok."""
    if status.ok():
        return 0
    if status.code() == StatusCode.kNoSpace:
        raise MemoryError(message_of(status))
    if status.code() == StatusCode.kOsError:
        raise OSError(status.detail(0), status.message().decode())
    raise ValueError(message_of(status))


cdef uint64_t whole(object value, str name) except? 0xffffffffffffffff:
    """`value` as an unsigned 64-bit number below 2^63; ValueError naming the argument."""
    cdef object number
    cdef long long result
    try:
        number = value.__index__()
    except AttributeError:
        raise TypeError(f"{name}: must be an int, not {type(value).__name__}") from None
    try:
        result = PyLong_AsLongLong(number)
    except OverflowError:
        result = -1
    if result < 0:
        raise ValueError(f"{name}: must be between 0 and 2**63 - 1, not {value!r}")
    return <uint64_t>result


cdef uint32_t whole32(object value, str name) except? 0xffffffff:
    cdef uint64_t result = whole(value, name)
    if result > <uint64_t>0xffffffff:
        raise ValueError(f"{name}: must be below 2**32, not {value!r}")
    return <uint32_t>result


cdef bytes digest_bytes(Digest& digest):
    return PyBytes_FromStringAndSize(<char*>digest.data(), 32)


cdef int set_blocks(vector[uint32_t]& blocks, object ids, bint may_skip) except -1:
    cdef int64_t block
    cdef Py_ssize_t index = 0
    blocks.reserve(len(ids))
    for block_id in ids:
        try:
            block = block_id
        except OverflowError:
            block = 0xffffffff
        if block < 0 and may_skip:
            blocks.push_back(kSkipBlock)
        elif 0 <= block < <int64_t>0xffffffff:
            blocks.push_back(<uint32_t>block)
        else:
            raise ValueError(f"block_ids: not a block of the plan (got {block_id}, at index {index})")
        index += 1
    return 0


def record_bytes(section_count, payload_bytes):
    cdef uint64_t result = 0
    check(c_record_bytes(whole(section_count, "section_count"), whole(payload_bytes, "payload_bytes"), &result))
    return result


cdef BlockShape shape_of(object dims, object run_bytes, str where) except *:
    cdef vector[CopyDim] outer
    cdef CopyDim dim
    cdef BlockShape shape
    cdef Status status
    for count, stride in dims:
        dim.count = whole(count, where + "dims")
        dim.stride = whole(stride, where + "dims")
        outer.push_back(dim)
    status = BlockShape.create(DimSpan(outer.data(), outer.size()), whole(run_bytes, where + "run_bytes"), &shape)
    if not status.ok():
        raise ValueError(where + message_of(status))
    return shape


cdef class CopyPlan:
    def __cinit__(
        self, section_bases, num_blocks, block_stride, dims=(), run_bytes=None, *, shapes=None, section_shapes=None
    ):
        cdef vector[CopySection] sections
        cdef vector[BlockShape] all_shapes
        cdef CopySection section
        if shapes is None:
            all_shapes.push_back(shape_of(dims, run_bytes, ""))
            section_shapes = [0] * len(section_bases)
        elif dims or run_bytes is not None:
            raise TypeError("shapes: describe every section, so dims and run_bytes may not be given with them")
        else:
            for index, (dims, run_bytes) in enumerate(shapes):
                all_shapes.push_back(shape_of(dims, run_bytes, f"shapes[{index}]."))
        for name, entries in (("block_stride", block_stride), ("section_shapes", section_shapes)):
            if len(section_bases) != len(entries):
                raise ValueError(
                    f"{name}: must have one entry per section, {len(section_bases)}, not {len(entries)}"
                )
        for base, stride, shape in zip(section_bases, block_stride, section_shapes):
            section.base = whole(base, "section_bases")
            section.block_stride = whole(stride, "block_stride")
            section.shape = whole32(shape, "section_shapes")
            sections.push_back(section)
        check(CCopyPlan.create(move(sections), whole(num_blocks, "num_blocks"), move(all_shapes), &self.plan))

    @property
    def section_count(self):
        return self.plan.get().section_count()

    @property
    def num_blocks(self):
        return self.plan.get().num_blocks()

    def section_bytes(self, section, n_blocks):
        cdef uint64_t which = whole(section, "section")
        cdef uint64_t count = whole(n_blocks, "n_blocks")
        cdef uint64_t payload = 0
        if which >= self.plan.get().section_count():
            raise ValueError(f"section: {which} of a plan with {self.plan.get().section_count()}")
        check(self.plan.get().payload_bytes(count, &payload))
        return self.plan.get().section_bytes(which, count)

    def payload_bytes(self, n_blocks):
        cdef uint64_t result = 0
        check(self.plan.get().payload_bytes(whole(n_blocks, "n_blocks"), &result))
        return result

    def record_bytes(self, n_blocks):
        cdef uint64_t result = 0
        check(self.plan.get().record_bytes(whole(n_blocks, "n_blocks"), &result))
        return result


cdef class RecordSpec:
    def __cinit__(self, key, identity, slice_digest, parent_key, chunk_tokens, created_unix_ms=0):
        set_digest(self.spec.key, key, "key")
        set_digest(self.spec.identity, identity, "identity")
        set_digest(self.spec.slice_digest, slice_digest, "slice_digest")
        set_digest(self.spec.parent_key, parent_key or bytes(32), "parent_key")
        self.spec.chunk_tokens = whole32(chunk_tokens, "chunk_tokens")
        self.spec.created_unix_ms = whole(created_unix_ms, "created_unix_ms")

    @property
    def key(self):
        return digest_bytes(self.spec.key)


def gather_record(CopyPlan plan not None, block_ids, extent_address, extent_len, RecordSpec spec not None):
    cdef vector[uint32_t] blocks
    cdef void* record = <void*><size_t>whole(extent_address, "extent_address")
    cdef uint64_t length = whole(extent_len, "extent_len")
    cdef Status status
    set_blocks(blocks, block_ids, False)
    with nogil:
        status = c_gather_record(
            plan.plan.get()[0], BlockSpan(blocks.data(), blocks.size()), record, length, spec.spec
        )
    check(status)


def scatter_record(CopyPlan plan not None, block_ids, extent_address, extent_len, expected_key):
    cdef vector[uint32_t] blocks
    cdef const void* record = <const void*><size_t>whole(extent_address, "extent_address")
    cdef uint64_t length = whole(extent_len, "extent_len")
    cdef Digest key
    cdef Status status
    set_digest(key, expected_key, "expected_key")
    set_blocks(blocks, block_ids, True)
    with nogil:
        status = c_scatter_record(
            plan.plan.get()[0], BlockSpan(blocks.data(), blocks.size()), record, length, key
        )
    if status.code() == StatusCode.kBadArgument or status.code() == StatusCode.kOutOfRange:
        check(status)
    return <int>copy_outcome(status)


cdef int verify(object address, object length, object expected_key, bint stored, Status* status) except -1:
    cdef const void* record = <const void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Digest key
    cdef const Digest* expected = NULL
    if record == NULL:
        raise ValueError("address: may not be 0")
    if expected_key is not None:
        set_digest(key, expected_key, "expected_key")
        expected = &key
    with nogil:
        if stored:
            status[0] = c_verify_stored_record(record, n, expected)
        else:
            status[0] = c_verify_record(record, n, expected)
    return 0


def verify_record(address, length, expected_key):
    cdef Status status
    verify(address, length, expected_key, False, &status)
    return <int>copy_outcome(status)


def verify_stored_record(address, length, expected_key):
    cdef Status status
    verify(address, length, expected_key, True, &status)
    return <int>copy_outcome(status)


cdef extern from *:
    """
    #include "kvstrata/crew.h"

    namespace {
    struct StoredRecord {
      const void* bytes;
      std::uint64_t length;
      kvstrata::Digest key;
      int outcome;
    };

    void verify_each(kvstrata::Crew& crew, std::vector<StoredRecord>& records) {
      crew.each(records.size(), [&](std::size_t i) {
        StoredRecord& record = records[i];
        record.outcome = static_cast<int>(kvstrata::copy_outcome(
            kvstrata::verify_stored_record(record.bytes, record.length, &record.key)));
      });
    }
    }
    """
    cdef cppclass Crew "kvstrata::Crew":
        Crew(size_t) except +
    cdef struct StoredRecord:
        const void* bytes
        uint64_t length
        Digest key
        int outcome
    void verify_each(Crew&, vector[StoredRecord]&) except + nogil


cdef class Verifier:
    """See copying.pyi."""

    cdef unique_ptr[Crew] crew

    def __cinit__(self, helpers):
        self.crew.reset(new Crew(<size_t>whole(helpers, "helpers")))

    def __dealloc__(self):
        with nogil:
            self.crew.reset()

    def verify_stored(self, records):
        cdef vector[StoredRecord] given
        cdef size_t i = 0
        given.resize(len(records))
        for address, length, key in records:
            given[i].bytes = <const void*><size_t>whole(address, "address")
            given[i].length = whole(length, "length")
            if given[i].bytes == NULL:
                raise ValueError("address: may not be 0")
            set_digest(given[i].key, key, "key")
            i += 1
        with nogil:
            verify_each(self.crew.get()[0], given)
        return [given[i].outcome for i in range(given.size())]


cdef int read_header(
    object address, object length, CRecordHeader* header, vector[Section]& sections
) except -1:
    """Headers and table; RecordError for unsound ones."""
    cdef const void* record = <const void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Status status
    if record == NULL:
        raise ValueError("address: may not be 0")
    sections.resize(256)
    with nogil:
        status = read_record_header(record, n, header, sections.data(), sections.size())
        if status.ok() and header.section_count > sections.size():
            sections.resize(header.section_count)
            status = read_record_header(record, n, header, sections.data(), sections.size())
            if status.ok() and header.section_count > sections.size():
                header.section_count = <uint32_t>sections.size()
    if not status.ok():
        message = message_of(status)
        raise RecordError(message, field=message.partition(":")[0])
    return 0


def write_encoded_header(
    address, length, source_address, source_length, codecs, stored_bytes, stored_crc=0, section_crcs=None
):
    cdef CRecordHeader header
    cdef vector[Section] sections
    cdef RecordEncoding encoding
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef const unsigned char[::1] chain = codecs
    cdef Status status
    if chain.shape[0] > 8:
        raise ValueError(f"codecs: a record names at most 8, not {chain.shape[0]}")
    encoding.stored_bytes = whole(stored_bytes, "stored_bytes")
    encoding.stored_crc = whole32(stored_crc, "stored_crc")
    for i in range(chain.shape[0]):
        encoding.codecs[i] = chain[i]
    read_header(source_address, source_length, &header, sections)
    if section_crcs is not None:
        if len(section_crcs) != header.section_count:
            raise ValueError(f"section_crcs: {len(section_crcs)} for {header.section_count} sections")
        for i in range(header.section_count):
            sections[i].crc = whole32(section_crcs[i], "section_crcs")
    with nogil:
        status = c_write_encoded_header(
            record, n, header.spec, sections.data(), header.section_count, encoding
        )
    check(status)
    return header.header_bytes


def write_decoded_header(address, length, source_address, source_length):
    cdef CRecordHeader header
    cdef vector[Section] sections
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef Status status
    read_header(source_address, source_length, &header, sections)
    with nogil:
        status = write_record_header(record, n, header.spec, sections.data(), header.section_count)
    check(status)


def explain_record(address, length, expected_key):
    cdef Status status
    verify(address, length, expected_key, True, &status)
    return None if status.ok() else message_of(status)


def record_header(address, length):
    cdef CRecordHeader header
    cdef vector[Section] sections
    read_header(address, length, &header, sections)
    return RecordHeader(
        digest_bytes(header.spec.key),
        digest_bytes(header.spec.identity),
        digest_bytes(header.spec.slice_digest),
        digest_bytes(header.spec.parent_key),
        header.spec.chunk_tokens,
        header.spec.created_unix_ms,
        header.header_bytes,
        header.payload_bytes,
        header.stored_bytes,
        header.stored_crc,
        (<char*>header.codecs)[:8].rstrip(b"\0"),
        header.crc_pending(),
        tuple([(sections[i].offset, sections[i].length, sections[i].crc) for i in range(header.section_count)]),
    )


def seal_record(address, length, RecordSpec spec not None, section_lengths):
    cdef void* record = <void*><size_t>whole(address, "address")
    cdef uint64_t n = whole(length, "length")
    cdef vector[uint32_t] lengths
    cdef Status status
    for section_length in section_lengths:
        lengths.push_back(whole32(section_length, "section_lengths"))
    with nogil:
        status = c_seal_record(record, n, spec.spec, lengths.data(), lengths.size())
    check(status)


cdef CopyKind kind_of(object kind) except *:
    if kind == "gather":
        return CopyKind.kGather
    if kind == "scatter":
        return CopyKind.kScatter
    raise ValueError(f"kind: must be 'gather' or 'scatter', not {kind!r}")


cdef int set_items(vector[CopyItem]& out, CopyKind kind, object items) except -1:
    cdef Py_ssize_t index = 0
    cdef CopyItem* item
    out.reserve(len(items))
    for block_ids, extent_address, extent_len, what in items:
        try:
            out.emplace_back()
            item = &out.back()
            set_blocks(item.blocks, block_ids, kind == CopyKind.kScatter)
            item.record = <void*><size_t>whole(extent_address, "extent_address")
            item.length = whole(extent_len, "extent_len")
            if kind == CopyKind.kScatter:
                set_digest(item.spec.key, what, "key")
            elif isinstance(what, RecordSpec):
                item.spec = (<RecordSpec>what).spec
            else:
                raise TypeError(f"spec: must be a RecordSpec, not {type(what).__name__}")
        except ValueError as error:
            raise ValueError(f"items[{index}].{error}") from None
        index += 1
    return 0


cdef list codes_of(const vector[CopyResult]& results):
    cdef list codes = []
    for i in range(results.size()):
        codes.append(<int>results[i].outcome)
    return codes


cdef int check_job(const Status& status) except -1:
    """Like check, but detail(2) is the index of an item."""
    if status.ok():
        return 0
    if status.code() == StatusCode.kNoSpace:
        raise MemoryError(status.message().decode())
    where = f"items[{status.detail(2)}]." if status.detail(2) >= 0 else ""
    text = status.message().decode()
    values = f" (got {status.detail(0)}, limit {status.detail(1)})" if status.detail(1) else ""
    raise ValueError(f"{where}{text}{values}")


cdef class CopyEngine:
    cdef unique_ptr[CCopyEngine] engine
    cdef readonly int event_fd
    cdef readonly int threads

    def __cinit__(self, threads=2, queue=256):
        self.threads = <int>min(whole(threads, "threads"), <uint64_t>1000)  # create() refuses that many
        check(CCopyEngine.create(self.threads, whole(queue, "queue"), &self.engine))
        self.event_fd = self.engine.get().event_fd()

    def __dealloc__(self):
        with nogil:  # joins the threads
            self.engine.reset()

    def submit(self, job_id, kind, CopyPlan plan not None, items):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.engine.get().submit(number, which, plan.plan, move(list_of))
        if status.code() == StatusCode.kQueueFull:
            return False
        check_job(status)
        return True

    def completions(self):
        cdef vector[CopyCompletion] done
        cdef Status status
        with nogil:
            status = self.engine.get().completions(&done)
        check(status)
        return [(done[i].job_id, codes_of(done[i].results)) for i in range(done.size())]

    def run(self, kind, CopyPlan plan not None, items):
        cdef CopyKind which = kind_of(kind)
        cdef vector[CopyItem] list_of
        cdef vector[CopyResult] results
        cdef Status status
        set_items(list_of, which, items)
        with nogil:
            status = self.engine.get().run(which, plan.plan, move(list_of), &results)
        check_job(status)
        return codes_of(results)

    def wait(self, job_id, timeout_s):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef double seconds = min(max(<double>timeout_s, 0.0), LONGEST_WAIT_S)
        cdef bint done
        with nogil:
            done = self.engine.get().wait(number, nanoseconds(<int64_t>(seconds * 1e9)))
        return done

    def cancel(self, job_id):
        cdef uint64_t number = whole(job_id, "job_id")
        cdef bint cancelled
        with nogil:
            cancelled = self.engine.get().cancel(number)
        return cancelled

    def drain(self):
        with nogil:
            self.engine.get().drain()

    def close(self):
        with nogil:
            self.engine.get().close()


def crc32c(buffer, crc=0):
    cdef uint32_t state = whole32(crc, "crc")
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if <size_t>view.len <= SHORT_BYTES:
            return core_crc32c(view.buf, <size_t>view.len, state)
        with nogil:
            state = core_crc32c(view.buf, <size_t>view.len, state)
        return state
    finally:
        PyBuffer_Release(&view)


def crc32c_at(address, length, crc=0):
    cdef const void* where = <const void*><size_t>whole(address, "address")
    cdef size_t n = whole(length, "length")
    cdef uint32_t state = whole32(crc, "crc")
    if where == NULL and n != 0:
        raise ValueError("address: may not be 0")
    with nogil:
        state = core_crc32c(where, n, state)
    return state


def copy_at(destination, source, length, crc=0, *, cached=False):
    cdef void* dst = <void*><size_t>whole(destination, "destination")
    cdef const void* src = <const void*><size_t>whole(source, "source")
    cdef size_t n = whole(length, "length")
    cdef uint32_t state = whole32(crc, "crc")
    cdef StoreHint hint = StoreHint.kCached if cached else StoreHint.kStream
    if (dst == NULL or src == NULL) and n != 0:
        raise ValueError("destination, source: may not be 0")
    with nogil:
        state = copy_crc32c(dst, src, n, state, hint)
    return state


def copy_strided(target_address, target_length, sources, copies):
    cdef vector[ByteSpan] spans
    cdef vector[StridedCopy] all_copies
    cdef StridedCopy* copy
    cdef StridedLoop* loop
    cdef Status status
    cdef unsigned char* target = <unsigned char*><size_t>whole(target_address, "target_address")
    cdef size_t length = whole(target_length, "target_length")
    if target == NULL:
        raise ValueError("target_address: may not be 0")
    for address, n in sources:
        if address == 0:
            raise ValueError("sources: an address may not be 0")
        spans.push_back(ByteSpan(<const unsigned char*><size_t>whole(address, "sources"), whole(n, "sources")))
    for source, source_offset, target_offset, loops, run_bytes in copies:
        if len(loops) > kMaxStridedLoops:
            raise ValueError(f"copies: at most {kMaxStridedLoops} loops, not {len(loops)}")
        all_copies.emplace_back()
        copy = &all_copies.back()
        copy.source = whole32(source, "copies")
        copy.source_offset = whole(source_offset, "copies")
        copy.target_offset = whole(target_offset, "copies")
        copy.run_bytes = whole(run_bytes, "copies")
        copy.loop_count = <uint32_t>len(loops)
        loop = copy.loops_data()
        for count, source_stride, target_stride in loops:
            loop.count = whole(count, "copies")
            loop.source_stride = whole(source_stride, "copies")
            loop.target_stride = whole(target_stride, "copies")
            loop += 1
    with nogil:
        status = c_copy_strided(
            CopySpan(all_copies.data(), all_copies.size()),
            ByteSpans(spans.data(), spans.size()),
            WritableSpan(target, length),
        )
    check(status)


def libc_copy_at(destination, source, length):
    cdef void* dst = <void*><size_t>whole(destination, "destination")
    cdef const void* src = <const void*><size_t>whole(source, "source")
    cdef size_t n = whole(length, "length")
    if (dst == NULL or src == NULL) and n != 0:
        raise ValueError("destination, source: may not be 0")
    with nogil:
        memcpy(dst, src, n)


def buffer_address(buffer, *, writable=False):
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
    cdef size_t address = <size_t>view.buf
    PyBuffer_Release(&view)
    return address


def crc32c_path():
    return crc32c_path_name(core_crc32c_path()).decode()


def crc32c_paths():
    return [
        crc32c_path_name(<Crc32cPath>i).decode()
        for i in range(kCrc32cPathCount)
        if crc32c_path_supported(<Crc32cPath>i)
    ]


def set_crc32c_path(name):
    if name is None:
        crc32c_reset_path()
        return
    for i in range(kCrc32cPathCount):
        if crc32c_path_name(<Crc32cPath>i).decode() == name and crc32c_path_supported(<Crc32cPath>i):
            check(crc32c_set_path(<Crc32cPath>i))
            return
    raise ValueError(f"name: this CPU has no CRC32C path {name!r}, only {', '.join(crc32c_paths())}")
