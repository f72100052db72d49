# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""The shared-memory L1 pool (server), and what its clients map: see pool.pyi for the contract."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport move
from libcpp.vector cimport vector

import os

from core_status cimport Status, StatusCode

from kvstrata.errors import SegmentError


cdef extern from "kvstrata/status.h" namespace "kvstrata" nogil:
    const char* status_code_name(StatusCode) noexcept


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


cdef extern from "kvstrata/index.h" namespace "kvstrata" nogil:
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
        uint64_t epoch() noexcept
        uint64_t heartbeat_age_ns() noexcept
        cbool has_l2() noexcept
        uint64_t extents_bytes() noexcept
        PoolId pool_id() noexcept
        cbool is_open() noexcept
        void close() noexcept


cdef extern from "kvstrata/pool.h" namespace "kvstrata" nogil:
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

    cdef cppclass TenantStats "kvstrata::PoolStats::Tenant":
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
        uint64_t backed_bytes, missing_bytes, rows_capacity
        uint64_t entry_capacity, rows_claimed
        double fragmentation
        const char* policy
        vector[ClassStats] classes
        vector[TenantStats] tenants

    cdef cppclass ClearResult "kvstrata::Pool::ClearResult":
        uint64_t dropped, kept

    cdef cppclass ClearedInUse "kvstrata::Pool::ClearedInUse":
        uint64_t held, leased

    cdef cppclass LeaseResult "kvstrata::Pool::LeaseResult":
        uint64_t ticket
        uint64_t n_chunks
        uint64_t unverified
        uint64_t short_bytes
        vector[ExtentRecord] extents

    cdef cppclass ReserveRequest "kvstrata::Pool::ReserveRequest":
        const uint8_t* keys
        size_t n_keys
        const uint8_t* parent
        uint64_t record_bytes
        uint32_t row
        const uint8_t* identity
        uint32_t tenant

    cdef cppclass ReserveResult "kvstrata::Pool::ReserveResult":
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
        Status lease(const uint8_t*, size_t, size_t, U32Span, LeaseResult*) noexcept
        cbool release(uint64_t, int64_t) noexcept
        size_t leases_to_end(U64Span, uint64_t) noexcept
        Status verify(const uint8_t*, size_t, uint64_t*, uint64_t*) noexcept
        Status verify_next(uint64_t, uint64_t*) noexcept
        Status mark_bad(const CKey&, cbool*) noexcept
        Status reserve(const ReserveRequest&, ReserveResult*) noexcept
        Status commit(uint64_t, U32Span, cbool, uint8_t*) noexcept
        uint64_t abort(uint64_t, U32Span, cbool) noexcept
        Status hold(const CKey&, CHold*) noexcept
        Status hold_reserved(uint64_t, uint64_t, CHold*) noexcept
        uint64_t remove(const uint8_t*, size_t, cbool) noexcept
        ClearResult clear(int64_t, const uint8_t*) noexcept
        ClearedInUse cleared_in_use() noexcept
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


cdef enum:
    KEY_BYTES = 32
    EXTENT_BYTES = 24
    MAX_ROWS = 1024

MAX_SESSIONS = MAX_ROWS - 1
STATES = ("free", "reserved", "ready", "unverified", "quarantined")
OUTCOMES = (
    "reserved", "present", "in_flight", "chain_exceeds_pool", "pool_pinned", "session_limit", "quota", "too_large",
    "entries_full", "frozen", "parent_absent",
)


class PoolError(SegmentError):
    """The pool refused a call. `reason` is a stable word: sessions_full, closed, not_found, …"""

    def __init__(self, message, *, reason=""):
        super().__init__(message, field=reason)
        self.reason = reason


class PoolFormatError(SegmentError):
    """The files hold no pool that this version can adopt; nothing in them was changed."""

    def __init__(self, field, found, expected):
        super().__init__(
            f"pool files: {field} is {found:#x}, expected {expected:#x}; "
            "remove the segment to start with an empty pool",
            field=field,
        )
        self.found = found
        self.expected = expected


cdef object _error(Status status):
    cdef StatusCode code = status.code()
    message = status.message().decode()
    reason = status_code_name(code).decode()
    if code == StatusCode.kOsError:
        number = status.detail(0)
        return OSError(number, f"{message}: {os.strerror(number)}")
    if code == StatusCode.kBadArgument:
        if status.detail(0) or status.detail(1):
            message = f"{message} (got {status.detail(0)}, limit {status.detail(1)})"
        return ValueError(message)
    if message == "sessions_full":
        return PoolError(f"sessions_full: all {status.detail(0)} rows are claimed", reason="sessions_full")
    if status.detail(0) or status.detail(1):
        message = f"{message} ({status.detail(0)}, {status.detail(1)})"
    return PoolError(message, reason=reason)


cdef object _format_error(Status status, FormatMismatch* mismatch):
    if status.code() == StatusCode.kIncompatible:
        return PoolFormatError(mismatch.field.decode(), mismatch.found, mismatch.expected)
    return _error(status)


cdef class _Keys:
    """Borrowed buffer of whole 32-byte keys."""

    cdef Py_buffer buffer
    cdef bint held
    cdef const uint8_t* data
    cdef size_t count

    def __cinit__(self, keys, what="keys"):
        PyObject_GetBuffer(keys, &self.buffer, PyBUF_SIMPLE)
        self.held = True
        if self.buffer.len % KEY_BYTES:
            raise ValueError(f"{what}: {self.buffer.len} bytes is no multiple of {KEY_BYTES}")
        self.data = <const uint8_t*>self.buffer.buf
        self.count = <size_t>self.buffer.len // KEY_BYTES

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


cdef bytes _one_key(object key, str what):
    if not isinstance(key, bytes):
        key = bytes(key)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{what}: must be {KEY_BYTES} bytes, got {len(key)}")
    return key


cdef bytes _id16(object value, str what):
    if not isinstance(value, bytes) or len(value) != 16:
        raise ValueError(f"{what}: must be 16 bytes, got {value!r}")
    return value


cdef uint32_t _row(object row) except? 0xFFFFFFFF:
    if not 0 <= row < MAX_ROWS:
        raise ValueError(f"row: must be between 0 and {MAX_ROWS - 1}, got {row}")
    return row


cdef vector[uint32_t] _indices(object indices) except *:
    cdef vector[uint32_t] result
    for index in indices:
        # What cannot be an index names no item; the pool answers for it.
        result.push_back(<uint32_t>index if 0 <= index < 0xFFFFFFFF else 0xFFFFFFFF)
    return result


cdef bytes _packed(vector[ExtentRecord]& extents):
    return PyBytes_FromStringAndSize(<char*>extents.data(), <Py_ssize_t>(extents.size() * EXTENT_BYTES))


cdef bytes _key_bytes(const CKey& key):
    cdef uint8_t raw[KEY_BYTES]
    key.store(raw)
    return PyBytes_FromStringAndSize(<char*>raw, KEY_BYTES)


cdef class Hold:
    """See pool.pyi."""

    def __init__(self):
        raise TypeError("a Hold comes from Pool.hold()")

    @property
    def key(self):
        return _key_bytes(self.held.get().key())

    @property
    def offset(self):
        return self.held.get().offset()

    @property
    def length(self):
        return self.held.get().length()

    @property
    def generation(self):
        return self.held.get().generation()

    @property
    def tenant(self):
        return self.held.get().tenant()

    @property
    def address(self):
        return <size_t>self.held.get().address()

    @property
    def is_held(self):
        return bool(self.held.get().is_held())

    def drop(self):
        with nogil:
            self.held.get().drop()

    def view(self):
        if not self.held.get().is_held():
            raise PoolError("the hold was dropped", reason="closed")
        return memoryview(self)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef CHold* hold = self.held.get()
        PyBuffer_FillInfo(buffer, self, hold.address(), hold.length(), 0 if hold.is_reservation() else 1, flags)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.drop()

    def __repr__(self):
        state = "" if self.is_held else " dropped"
        return f"<Hold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"


cdef Hold _wrap_hold(CHold& hold):
    cdef Hold result = Hold.__new__(Hold)
    result.held = make_shared[CHold](move(hold))
    return result


cdef PoolOptions _options(extents_bytes, entry_capacity, policy, watermark, max_session_share) except *:
    cdef PoolOptions options
    if not 0 <= extents_bytes < 1 << 63:
        raise ValueError(f"extents_bytes: must be positive, got {extents_bytes}")
    if not 0 <= entry_capacity <= 1 << 30:
        raise ValueError(f"entry_capacity: must be between 1 and {1 << 30}, got {entry_capacity}")
    if not 1 <= max_session_share <= 1 << 20:
        raise ValueError(f"max_session_share: must be between 1 and {1 << 20}, got {max_session_share}")
    options.extents_bytes = extents_bytes
    options.entry_capacity = entry_capacity
    options.policy = policy.encode()
    options.watermark = watermark[0] if watermark is not None else 0.0
    options.watermark_ratio = watermark[1] if watermark is not None else 0.0
    options.max_session_share = max_session_share
    return options


cdef class Pool:
    """See pool.pyi."""

    cdef shared_ptr[CPool] pool

    def __init__(self):
        raise TypeError("a Pool comes from Pool.create() or Pool.adopt()")

    @staticmethod
    def create(int index_fd, int extents_fd, *, extents_bytes, entry_capacity, policy="LRU", watermark=None,
               max_session_share=8):
        cdef Pool self = Pool.__new__(Pool)
        cdef PoolOptions options = _options(extents_bytes, entry_capacity, policy, watermark, max_session_share)
        cdef Status status
        with nogil:
            status = CPool.create(index_fd, extents_fd, options, &self.pool)
        if not status.ok():
            raise _error(status)
        return self

    @staticmethod
    def adopt(int index_fd, int extents_fd, *, policy="LRU", watermark=None, max_session_share=8, extents_bytes=0,
              entry_capacity=0):
        cdef Pool self = Pool.__new__(Pool)
        cdef PoolOptions options = _options(extents_bytes, entry_capacity, policy, watermark, max_session_share)
        cdef Status status
        cdef FormatMismatch mismatch
        with nogil:
            status = CPool.adopt(index_fd, extents_fd, options, &self.pool, &mismatch)
        if not status.ok():
            raise _format_error(status, &mismatch)
        return self

    @property
    def epoch(self):
        return self.pool.get().epoch()

    @property
    def pool_id(self):
        return PyBytes_FromStringAndSize(id_bytes(self.pool.get().pool_id()), 16)

    @property
    def extents_bytes(self):
        return self.pool.get().extents_bytes()

    @property
    def extents_address(self):
        return <size_t>self.pool.get().extents_address()

    # rows

    def claim_row(self, session, group, pid, registers_memory=False):
        cdef const uint8_t* session_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(session, "session"))
        cdef const uint8_t* group_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(group, "group"))
        cdef uint32_t row = 0
        cdef Status status = self.pool.get().claim_row(
            session_bytes, group_bytes, pid, registers_memory, &row
        )
        if not status.ok():
            raise _error(status)
        return row

    def rows(self):
        cdef vector[RowInfo] rows = self.pool.get().rows()
        cdef size_t i
        return [
            {
                "row": rows[i].row,
                "session": PyBytes_FromStringAndSize(<char*>rows[i].session.data(), 16),
                "group": PyBytes_FromStringAndSize(<char*>rows[i].group.data(), 16),
                "pid": rows[i].pid,
                "old": bool(rows[i].old),
                "registers_memory": bool(rows[i].registers_memory),
            }
            for i in range(rows.size())
        ]

    def row_gone(self, row):
        cdef uint32_t number = _row(row)
        cdef Status status
        with nogil:
            status = self.pool.get().row_gone(number)
        if not status.ok():
            raise _error(status)

    def row_stranded(self, row):
        cdef uint32_t number = _row(row)
        cdef uint64_t kept_bytes = 0
        cdef Status status
        with nogil:
            status = self.pool.get().row_stranded(number, &kept_bytes)
        if not status.ok():
            raise _error(status)
        return kept_bytes

    def row_quiesced(self, row):
        cdef uint32_t number = _row(row)
        cdef Status status
        with nogil:
            status = self.pool.get().row_quiesced(number)
        if not status.ok():
            raise _error(status)

    # reading

    def peek(self, keys, size_t n_slices=1):
        cdef _Keys batch = _Keys(keys)
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        return self.pool.get().peek(batch.data, batch.count, n_slices)

    def lease(self, keys, size_t n_slices, rows):
        cdef _Keys batch = _Keys(keys)
        cdef vector[uint32_t] numbers
        cdef LeaseResult result
        cdef Status status
        for row in rows:
            numbers.push_back(_row(row))
        with nogil:
            status = self.pool.get().lease(
                batch.data, batch.count, n_slices, u32_span(numbers.data(), numbers.size()), &result
            )
        if not status.ok():
            raise _error(status)
        return result.ticket, result.n_chunks, _packed(result.extents), result.unverified, result.short_bytes

    def release(self, uint64_t ticket, int64_t row=-1):
        cdef cbool done
        with nogil:
            done = self.pool.get().release(ticket, row)
        return bool(done)

    def leases_to_end(self, tickets, uint64_t need_bytes):
        cdef vector[uint64_t] numbers
        cdef size_t count
        for ticket in tickets:
            numbers.push_back(ticket)
        with nogil:
            count = self.pool.get().leases_to_end(u64_span(numbers.data(), numbers.size()), need_bytes)
        return count

    def verify(self, keys):
        cdef _Keys batch = _Keys(keys)
        cdef uint64_t good = 0
        cdef uint64_t bad = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify(batch.data, batch.count, &good, &bad)
        if not status.ok():
            raise _error(status)
        return good, bad

    def verify_next(self, uint64_t max_bytes):
        cdef uint64_t remaining = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify_next(max_bytes, &remaining)
        if not status.ok():
            raise _error(status)
        return remaining

    def mark_bad(self, key):
        cdef bytes raw = _one_key(key, "key")
        cdef CKey native = CKey.load(PyBytes_AS_STRING(raw))
        cdef cbool dropped = False
        cdef Status status
        with nogil:
            status = self.pool.get().mark_bad(native, &dropped)
        if not status.ok():
            raise _error(status)
        return bool(dropped)

    # writing

    def reserve(self, keys, parent, record_bytes, row, identity, tenant=0):
        cdef _Keys batch = _Keys(keys)
        cdef bytes parent_key = _one_key(parent, "parent") if parent else b""
        cdef bytes identity_key = _one_key(identity, "identity")
        cdef ReserveRequest request
        cdef ReserveResult result
        cdef Status status
        if not 0 < record_bytes < 1 << 63:
            raise ValueError(f"record_bytes: must be positive, got {record_bytes}")
        request.keys = batch.data
        request.n_keys = batch.count
        request.parent = <const uint8_t*>PyBytes_AS_STRING(parent_key) if parent_key else NULL
        request.record_bytes = record_bytes
        request.row = _row(row)
        request.identity = <const uint8_t*>PyBytes_AS_STRING(identity_key)
        request.tenant = tenant
        with nogil:
            status = self.pool.get().reserve(request, &result)
        if not status.ok():
            raise _error(status)
        outcomes = PyBytes_FromStringAndSize(<char*>result.outcomes.data(), <Py_ssize_t>result.outcomes.size())
        return result.ticket, outcomes, _packed(result.extents)

    def commit(self, uint64_t ticket, indices, check=True):
        cdef vector[uint32_t] numbers = _indices(indices)
        cdef vector[uint8_t] outcomes
        cdef cbool checked = bool(check)
        cdef Status status
        outcomes.resize(numbers.size())
        with nogil:
            status = self.pool.get().commit(
                ticket, u32_span(numbers.data(), numbers.size()), checked, outcomes.data()
            )
        if not status.ok():
            raise _error(status)
        return PyBytes_FromStringAndSize(<char*>outcomes.data(), <Py_ssize_t>outcomes.size())

    def abort(self, uint64_t ticket, indices=None):
        cdef vector[uint32_t] numbers
        cdef cbool everything = indices is None
        cdef uint64_t count
        if indices is not None:
            numbers = _indices(indices)
        with nogil:
            count = self.pool.get().abort(ticket, u32_span(numbers.data(), numbers.size()), everything)
        return count

    def hold(self, key=None, uint64_t reserved_ticket=0, int64_t index=-1):
        cdef CHold hold
        cdef Status status
        cdef bytes raw
        if reserved_ticket:
            if index < 0:
                raise ValueError(f"index: must name an item of the reservation, got {index}")
            status = self.pool.get().hold_reserved(reserved_ticket, <uint64_t>index, &hold)
        else:
            raw = _one_key(key, "key")
            status = self.pool.get().hold(CKey.load(PyBytes_AS_STRING(raw)), &hold)
        if not status.ok():
            if status.code() == StatusCode.kNotFound:
                return None
            raise _error(status)
        return _wrap_hold(hold)

    # administration

    def remove(self, keys, cbool returned=False):
        cdef _Keys batch = _Keys(keys)
        cdef uint64_t count
        with nogil:
            count = self.pool.get().remove(batch.data, batch.count, returned)
        return count

    def clear(self, int64_t tenant=-1, identity=b""):
        cdef ClearResult result
        cdef bytes raw = _one_key(identity, "identity") if identity else b""
        cdef const uint8_t* wanted = <const uint8_t*>PyBytes_AS_STRING(raw) if raw else NULL
        with nogil:
            result = self.pool.get().clear(tenant, wanted)
        return result.dropped, result.kept

    def cleared_in_use(self):
        cdef ClearedInUse in_use
        with nogil:
            in_use = self.pool.get().cleared_in_use()
        return in_use.held, in_use.leased

    def ready_tags(self, uint64_t first, uint64_t max_entries):
        cdef vector[uint64_t] tags
        cdef uint64_t following
        with nogil:
            following = self.pool.get().ready_tags(first, max_entries, &tags)
        return PyBytes_FromStringAndSize(<char*>tags.data(), <Py_ssize_t>(8 * tags.size())), following

    def set_quota(self, uint32_t tenant, int64_t quota_bytes):
        with nogil:
            self.pool.get().set_quota(tenant, quota_bytes)

    def evict_to_watermark(self):
        cdef uint64_t count
        with nogil:
            count = self.pool.get().evict_to_watermark()
        return count

    def victims_preview(self, uint64_t need_bytes):
        cdef vector[CKey] keys
        cdef size_t i
        with nogil:
            keys = self.pool.get().victims_preview(need_bytes)
        return [_key_bytes(keys[i]) for i in range(keys.size())]

    def events(self):
        cdef uint64_t lost = 0
        cdef vector[CEvent] events
        cdef size_t i
        with nogil:
            events = self.pool.get().take_events(&lost)
        return [(<int>events[i].kind, _key_bytes(events[i].key), events[i].bytes) for i in range(events.size())]

    @property
    def events_lost(self):
        return self.pool.get().stats().events_lost

    def stats(self):
        cdef PoolStats s
        cdef size_t i
        with nogil:
            s = self.pool.get().stats()
        return {
            "policy": s.policy.decode(),
            "extents_bytes": s.extents_bytes,
            "used_bytes": s.used_bytes,
            "free_bytes": s.extents_bytes - s.used_bytes,
            "slab_bytes": s.slab_bytes,
            "unusable_bytes": s.unusable_bytes,
            "largest_allocatable_bytes": s.largest_allocatable_bytes,
            "fragmentation": s.fragmentation,
            "entry_capacity": s.entry_capacity,
            "entries": {STATES[i]: s.entries[i] for i in range(1, 5)},
            "bytes": {STATES[i]: s.bytes[i] for i in range(1, 5)},
            "reserved_bytes": s.bytes[1],
            "quarantined_bytes": s.bytes[4],
            "leased_bytes": s.leased_bytes,
            "pinned_bytes": s.pinned_bytes,
            "blocked_bytes": s.blocked_bytes,
            "leases": s.lease_tickets,
            "reservations": s.reservations,
            "holds": s.holds,
            "rows_claimed": s.rows_claimed,
            "rows_capacity": s.rows_capacity,
            "inserted_entries": s.inserted_entries,
            "inserted_bytes": s.inserted_bytes,
            "evicted_entries": s.evicted_entries,
            "evicted_bytes": s.evicted_bytes,
            "evictions": {
                "policy": s.evicted_by_policy,
                "window": s.evicted_by_window,
                "quota": s.evicted_by_quota,
                "watermark": s.evicted_by_watermark,
            },
            "cleared_entries": s.cleared_entries,
            "corrupt_entries": s.corrupt_entries,
            "quarantined_entries": s.quarantined_entries,
            "bad_records": s.bad_records,
            "refused": {OUTCOMES[i]: s.refused[i] for i in (*range(3, 9), 10)},
            "leases_trimmed": s.leases_trimmed,
            "adopted_entries": s.adopted_entries,
            "adoption_dropped": s.adoption_dropped,
            "events_lost": s.events_lost,
            "backed_bytes": s.backed_bytes,
            "missing_bytes": s.missing_bytes,
            "prefaulted_bytes": s.prefaulted_bytes,
            "prefault_error": self.pool.get().prefault().error(),
            "classes": [
                {
                    "extent_bytes": s.classes[i].extent_bytes,
                    "used": s.classes[i].used,
                    "capacity": s.classes[i].capacity,
                }
                for i in range(s.classes.size())
            ],
            "tenants": {
                s.tenants[i].tenant: {"bytes": s.tenants[i].bytes, "quota_bytes": s.tenants[i].quota_bytes}
                for i in range(s.tenants.size())
            },
        }

    def heartbeat(self):
        self.pool.get().heartbeat()

    def set_has_l2(self, has_l2):
        self.pool.get().set_has_l2(bool(has_l2))

    def retry_missing(self):
        cdef uint64_t missing
        with nogil:
            missing = self.pool.get().retry_missing()
        return missing

    def prefault_start(self, uint32_t threads):
        cdef Status status
        with nogil:
            status = self.pool.get().prefault_start(threads)
        if not status.ok():
            raise _error(status)

    @property
    def prefaulted_bytes(self):
        return self.pool.get().prefault().done_bytes()

    @property
    def closed(self):
        return bool(self.pool.get().is_closed())

    def close(self):
        with nogil:
            self.pool.get().close()

    def validate(self):
        cdef Status status
        with nogil:
            status = self.pool.get().validate()
        if not status.ok():
            raise _error(status)


cdef class IndexReader:
    """See pool.pyi."""

    cdef CIndexReader reader

    def __init__(self, int index_fd):
        cdef FormatMismatch mismatch
        cdef Status status = CIndexReader.open(index_fd, &self.reader, &mismatch)
        if not status.ok():
            raise _format_error(status, &mismatch)

    cdef int _check(self) except -1:
        if not self.reader.is_open():
            raise PoolError("the index reader was closed", reason="closed")
        return 0

    def peek(self, keys, size_t n_slices=1):
        # Microseconds: giving up the GIL could cost the caller a whole switch interval.
        cdef _Keys batch = _Keys(keys)
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        self._check()
        return self.reader.peek(batch.data, batch.count, n_slices)

    @property
    def epoch(self):
        self._check()
        return self.reader.epoch()

    @property
    def pool_id(self):
        self._check()
        return PyBytes_FromStringAndSize(id_bytes(self.reader.pool_id()), 16)

    @property
    def heartbeat_age_s(self):
        self._check()
        cdef uint64_t age = self.reader.heartbeat_age_ns()
        return float("inf") if age == 0xFFFFFFFFFFFFFFFF else age * 1e-9

    @property
    def has_l2(self):
        self._check()
        return bool(self.reader.has_l2())

    @property
    def extents_bytes(self):
        self._check()
        return self.reader.extents_bytes()

    def close(self):
        self.reader.close()


cdef class ExtentsMap:
    """See pool.pyi."""

    cdef Mapping mapping
    cdef readonly size_t length
    cdef Py_ssize_t exports

    def __init__(self, int extents_fd, length):
        if length <= 0:
            raise ValueError(f"length: must be positive, got {length}")
        size = os.fstat(extents_fd).st_size
        if size < length:
            raise PoolFormatError("extents_file_bytes", size, length)
        cdef Status status = Mapping.map(extents_fd, length, True, True, &self.mapping)
        if not status.ok():
            raise _error(status)
        self.length = length

    @property
    def address(self):
        if self.mapping.address() == NULL:
            raise PoolError("the extents map was closed", reason="closed")
        return <size_t>self.mapping.address()

    def view(self, offset, length):
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"extent {offset}+{length} leaves the pool of {self.length} bytes")
        return memoryview(self)[offset : offset + length]

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self.mapping.address() == NULL:
            raise PoolError("the extents map was closed", reason="closed")
        PyBuffer_FillInfo(buffer, self, self.mapping.address(), <Py_ssize_t>self.length, 0, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.exports -= 1

    def close(self):
        if self.exports:
            raise BufferError("cannot close an extents map while views of it exist")
        self.mapping.reset()


cdef class LentHold:
    """See pool.pyi."""

    cdef ExtentsMap extents
    cdef readonly bytes key
    cdef readonly size_t offset
    cdef readonly size_t length
    cdef readonly size_t address
    cdef bint writable
    cdef object dropped

    def __init__(self, ExtentsMap extents not None, bytes key, offset, length, *, bint writable, dropped):
        if offset < 0 or length < 0 or offset + length > extents.length:
            raise ValueError(f"extent {offset}+{length} leaves the pool of {extents.length} bytes")
        self.address = <size_t>extents.address + <size_t>offset
        self.extents, self.key, self.offset, self.length = extents, key, offset, length
        self.writable, self.dropped = writable, dropped

    @property
    def generation(self):
        return 0

    @property
    def is_held(self):
        return self.dropped is not None

    def drop(self):
        dropped, self.dropped = self.dropped, None
        if dropped is not None:
            dropped()

    def view(self):
        if self.dropped is None:
            raise PoolError("the hold was dropped", reason="closed")
        return memoryview(self)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self.extents.mapping.address() == NULL:
            raise PoolError("the extents map was closed", reason="closed")
        PyBuffer_FillInfo(buffer, self, <void*>self.address, <Py_ssize_t>self.length, not self.writable, flags)
        self.extents.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.extents.exports -= 1

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.drop()

    def __del__(self):
        self.drop()

    def __repr__(self):
        state = "" if self.is_held else " dropped"
        return f"<LentHold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"
