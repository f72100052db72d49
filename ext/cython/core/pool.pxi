# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The shared-memory L1 pool of a server.

cdef enum:
    EXTENT_BYTES = 24
    MAX_ROWS = 1024

MAX_SESSIONS = MAX_ROWS - 1


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


cdef vector[uint32_t] _rows(object rows) except *:
    cdef vector[uint32_t] result
    for row in rows:
        result.push_back(_row(row))
    return result


cdef vector[uint32_t] _indices(object indices) except *:
    cdef vector[uint32_t] result
    for index in indices:
        # A number that cannot be an index names no item, and the pool says so.
        result.push_back(<uint32_t>index if 0 <= index < 0xFFFFFFFF else 0xFFFFFFFF)
    return result


cdef bytes _packed(vector[ExtentRecord]& extents):
    return PyBytes_FromStringAndSize(<char*>extents.data(), <Py_ssize_t>(extents.size() * EXTENT_BYTES))


cdef bytes _key_bytes(const CKey& key):
    cdef uint8_t raw[KEY_BYTES]
    key.store(raw)
    return PyBytes_FromStringAndSize(<char*>raw, KEY_BYTES)


cdef class Hold:
    def __cinit__(self, made=None):
        if made is not MADE_HERE:
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
    def tenant(self):
        return self.held.get().tenant()

    @property
    def address(self):
        return <size_t>self.held.get().address()

    def drop(self):
        with nogil:
            self.held.get().drop()

    def uncount(self):
        self.held.get().uncount()

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
        state = "" if self.held.get().is_held() else " dropped"
        return f"<Hold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"


cdef Hold _wrap_hold(CHold& hold):
    cdef Hold result = Hold.__new__(Hold, MADE_HERE)
    result.held = make_shared[CHold](move(hold))
    return result


cdef class LoadRequest:
    cdef CLoadRequest request
    cdef BorrowedBuffer keys

    def __init__(self, keys, parents, room_bytes, identity, tenant=0, cbool tail=False):
        cdef bytes before = bytes(parents)
        for size in room_bytes:
            if not 0 < size < 1 << 63:
                raise ValueError(f"room_bytes: must be positive, got {size}")
            self.request.room_bytes.push_back(size)
        self.request.n_keys = borrow(self.keys, keys, KEY_BYTES, "keys")
        self.request.keys = self.keys.data()
        n_slices = self.request.room_bytes.size()
        if n_slices == 0 or self.request.n_keys % n_slices or len(before) not in (0, n_slices * KEY_BYTES):
            raise ValueError(f"keys, parents: must be {KEY_BYTES} bytes for each of {n_slices} slices")
        self.request.parents.resize(len(before))
        memcpy(self.request.parents.data(), PyBytes_AS_STRING(before), len(before))
        set_digest(self.request.identity, identity, "identity")
        self.request.tenant = tenant
        self.request.tail = tail


cdef class LoadBatch:
    cdef unique_ptr[CLoadBatch] batch
    cdef readonly list numbers, present, holds
    cdef readonly object refusal

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("a LoadBatch comes from Pool.reserve_batch()")
        self.batch.reset(new CLoadBatch())

    def finish(self, loaded):
        cdef BorrowedBuffer each
        cdef size_t count = borrow(each, loaded, 1, "loaded")
        cdef bytes outcomes
        cdef Status status
        if count != self.batch.get().numbers.size():
            raise ValueError(f"loaded: must have a byte for each of {self.batch.get().numbers.size()} items, got {count}")
        outcomes = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>count)
        cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(outcomes)
        with nogil:
            status = self.batch.get().finish(each.data(), out)
        raise_for(status, POOL)
        return outcomes


cdef list _sizes(const vector[Forecast]& found):
    return [(found[i].factor, found[i].hits, found[i].seconds) for i in range(found.size())]


cdef PoolOptions _options(extents_bytes, entry_capacity, policy, max_session_share, depth_cost, lessons) except *:
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
    options.max_session_share = max_session_share
    if not 0 <= depth_cost <= 1:
        raise ValueError(f"depth_cost: must be between 0 and 1, got {depth_cost}")
    options.depth_cost = depth_cost
    options.lessons = lessons
    return options


cdef class Shadow:
    cdef unique_ptr[CShadow] shadow

    def __cinit__(
        self, *, capacity, policy="VALUE", depth_cost=0.0085, refuses=True, size_t engine_chunks=0, cbool late=False
    ):
        if not 1 <= capacity <= 1 << 30:
            raise ValueError(f"capacity: must be between 1 and {1 << 30} chunks, got {capacity}")
        if policy not in ("VALUE", "LRU"):
            raise ValueError(f"policy: must be VALUE or LRU, got {policy!r}")
        self.shadow.reset(new CShadow(capacity, policy.encode(), depth_cost, refuses, engine_chunks, late))

    def replay(self, bytes log):
        cdef string requests = log
        cdef cbool complete
        with nogil:
            complete = self.shadow.get().replay(requests)
        return complete

    @property
    def sums(self):
        cdef ShadowSums sums = self.shadow.get().sums()
        return sums.chunks, sums.hit_chunks, sums.cost, sums.hit_cost


cdef class Pool:
    cdef shared_ptr[CPool] pool

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("a Pool comes from Pool.create() or Pool.adopt()")

    @staticmethod
    def create(int index_fd, int extents_fd, *, extents_bytes, entry_capacity, policy="VALUE",
               max_session_share=8, depth_cost=0.0085, lessons=b""):
        cdef Pool self = Pool.__new__(Pool, MADE_HERE)
        cdef PoolOptions options = _options(
            extents_bytes, entry_capacity, policy, max_session_share, depth_cost, lessons
        )
        cdef Status status
        with nogil:
            status = CPool.create(index_fd, extents_fd, options, &self.pool)
        raise_for(status, POOL)
        return self

    @staticmethod
    def adopt(int index_fd, int extents_fd, *, policy="VALUE", max_session_share=8, extents_bytes=0,
              entry_capacity=0, depth_cost=0.0085, lessons=b""):
        cdef Pool self = Pool.__new__(Pool, MADE_HERE)
        cdef PoolOptions options = _options(
            extents_bytes, entry_capacity, policy, max_session_share, depth_cost, lessons
        )
        cdef Status status
        cdef FormatMismatch mismatch
        with nogil:
            status = CPool.adopt(index_fd, extents_fd, options, &self.pool, &mismatch)
        raise_for_format(status, POOL, mismatch.field, mismatch.found, mismatch.expected)
        return self

    @property
    def epoch(self):
        return self.pool.get().epoch()

    @property
    def pool_id(self):
        return (<char*>self.pool.get().pool_id().data())[:16]

    @property
    def extents_bytes(self):
        return self.pool.get().extents_bytes()

    @property
    def extents_address(self):
        return <size_t>self.pool.get().extents_address()

    # the policy

    def learn(self):
        cdef cbool learnt
        with nogil:
            learnt = self.pool.get().learn()
        return learnt

    def missed(self, keys, size_t n_slices=1, uint32_t tenant=0):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef const uint8_t* data = batch.data()
        with nogil:
            self.pool.get().missed(data, n_keys, n_slices, tenant)

    def hint(self, keys, uint8_t next):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef const uint8_t* data = batch.data()
        cdef size_t hinted
        with nogil:
            hinted = self.pool.get().hint(data, n_keys, next)
        return hinted

    def log_requests(self, uint64_t salt):
        self.pool.get().request_log().start(salt)

    def take_requests(self):
        return self.pool.get().request_log().take()

    def forecasts(self):
        cdef Forecasts found
        with nogil:
            found = self.pool.get().forecasts()
        return _sizes(found.sizes), [
            (None if one.is_rest else one.tenant, one.bytes, one.part, _sizes(one.sizes)) for one in found.tenants
        ]

    def lessons(self):
        return self.pool.get().lessons()

    @staticmethod
    def are_lessons(bytes lessons):
        return CPool.are_lessons(lessons)

    def set_model(self, identity, uint8_t model):
        self.pool.get().set_model(CKey.load(PyBytes_AS_STRING(_one_key(identity, "identity"))), model)

    def set_cost(self, uint8_t model, double cost):
        self.pool.get().set_cost(model, cost)

    def set_time(self, monotonic_ns):
        self.pool.get().set_time(monotonic_ns)

    # rows

    def claim_row(self, session, group, pid, registers_memory=False):
        cdef const uint8_t* session_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(session, "session"))
        cdef const uint8_t* group_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(group, "group"))
        cdef uint32_t row = 0
        cdef Status status = self.pool.get().claim_row(
            session_bytes, group_bytes, pid, registers_memory, &row
        )
        raise_for(status, POOL)
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
        raise_for(status, POOL)

    def row_stranded(self, row):
        cdef uint32_t number = _row(row)
        cdef uint64_t kept_bytes = 0
        cdef Status status
        with nogil:
            status = self.pool.get().row_stranded(number, &kept_bytes)
        raise_for(status, POOL)
        return kept_bytes

    def row_quiesced(self, row):
        cdef uint32_t number = _row(row)
        cdef Status status
        with nogil:
            status = self.pool.get().row_quiesced(number)
        raise_for(status, POOL)

    # reading

    def peek(self, keys, size_t n_slices=1):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        return self.pool.get().peek(batch.data(), n_keys, n_slices)

    def has(self, keys):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef bytes answers = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>n_keys)
        self.pool.get().has(batch.data(), n_keys, <uint8_t*>PyBytes_AS_STRING(answers))
        return answers

    def peek_windows(self, keys, spans):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[uint32_t] each = spans_of(spans, n_keys)
        return self.pool.get().peek_windows(batch.data(), n_keys // each.size(), U32Span(each.data(), each.size()))

    def lease(
        self, keys, size_t n_slices, rows, identity=b"", spans=(), cbool again=False, cbool unread=False,
        size_t own_chunks=0, uint32_t tenant=0
    ):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[uint32_t] numbers = _rows(rows)
        cdef vector[uint32_t] each = spans_or_zeros(spans, n_slices, n_keys)
        cdef LeaseResult result
        cdef Status status
        cdef bytes root = _one_key(identity, "identity") if identity else b""
        cdef const uint8_t* wanted = <const uint8_t*>PyBytes_AS_STRING(root) if root else NULL
        with nogil:
            status = self.pool.get().lease(
                batch.data(), n_keys, U32Span(each.data(), each.size()), U32Span(numbers.data(), numbers.size()),
                wanted, again, &result, unread, own_chunks, tenant
            )
        raise_for(status, POOL)
        return result.ticket, result.n_chunks, _packed(result.extents), result.unverified, result.short_bytes

    def lease_chain(
        self, root, chain, slices, rows, spans, size_t max_keys, cbool again=False, size_t own_chunks=0,
        uint32_t tenant=0
    ):
        cdef BorrowedBuffer chain_batch, slice_batch
        cdef size_t n_chunks = borrow(chain_batch, chain, KEY_BYTES, "chain")
        cdef size_t n_slices = borrow(slice_batch, slices, KEY_BYTES, "slices")
        cdef vector[uint32_t] numbers = _rows(rows)
        cdef vector[uint32_t] each = spans_or_zeros(spans, n_slices, n_slices)
        cdef LeaseResult result
        cdef Status status
        cdef Digest identity
        cdef unique_ptr[CChainKeys] keys
        set_digest(identity, root, "root")
        keys.reset(new CChainKeys(
            identity, DigestSpan(<const Digest*>chain_batch.data(), n_chunks),
            DigestSpan(<const Digest*>slice_batch.data(), n_slices), U32Span(each.data(), each.size()), max_keys
        ))
        with nogil:
            status = self.pool.get().lease_chain(
                dereference(keys), U32Span(each.data(), each.size()), U32Span(numbers.data(), numbers.size()),
                identity.data(), again, &result, own_chunks, tenant
            )
        raise_for(status, POOL)
        if result.exceeded:
            return None
        size = keys.get().whole().size() * KEY_BYTES if result.n_chunks < n_chunks else 0
        whole = PyBytes_FromStringAndSize(<const char*>keys.get().whole().data(), <Py_ssize_t>size)
        return result.ticket, result.n_chunks, _packed(result.extents), result.unverified, result.short_bytes, whole

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
            count = self.pool.get().leases_to_end(U64Span(numbers.data(), numbers.size()), need_bytes)
        return count

    def verify(self, keys):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef uint64_t good = 0
        cdef uint64_t bad = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify(batch.data(), n_keys, &good, &bad)
        raise_for(status, POOL)
        return good, bad

    def verify_next(self, uint64_t max_bytes):
        cdef uint64_t remaining = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify_next(max_bytes, &remaining)
        raise_for(status, POOL)
        return remaining

    def mark_bad(self, key, identity=b""):
        cdef bytes raw = _one_key(key, "key")
        cdef bytes root = _one_key(identity, "identity") if identity else b""
        cdef const uint8_t* wanted = <const uint8_t*>PyBytes_AS_STRING(root) if root else NULL
        cdef CKey native = CKey.load(PyBytes_AS_STRING(raw))
        cdef cbool dropped = False
        cdef Status status
        with nogil:
            status = self.pool.get().mark_bad(native, wanted, &dropped)
        raise_for(status, POOL)
        return bool(dropped)

    # writing

    def is_tail(self, key):
        cdef bytes raw = _one_key(key, "key")
        return bool(self.pool.get().is_tail(CKey.load(PyBytes_AS_STRING(raw))))

    def is_reserved(self, key):
        cdef bytes raw = _one_key(key, "key")
        return bool(self.pool.get().is_reserved(CKey.load(PyBytes_AS_STRING(raw))))

    def reserve(self, keys, parent, record_bytes, row, identity, tenant=0, cbool tail=False, uint64_t extent_bytes=0):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef bytes parent_key = _one_key(parent, "parent") if parent else b""
        cdef bytes identity_key = _one_key(identity, "identity")
        cdef ReserveRequest request
        cdef ReserveResult result
        cdef Status status
        if not 0 < record_bytes < 1 << 63:
            raise ValueError(f"record_bytes: must be positive, got {record_bytes}")
        request.keys = batch.data()
        request.n_keys = n_keys
        request.parent = <const uint8_t*>PyBytes_AS_STRING(parent_key) if parent_key else NULL
        request.record_bytes = record_bytes
        request.tail = tail
        request.extent_bytes = extent_bytes
        request.row = _row(row)
        request.identity = <const uint8_t*>PyBytes_AS_STRING(identity_key)
        request.tenant = tenant
        with nogil:
            status = self.pool.get().reserve(request, &result)
        raise_for(status, POOL)
        outcomes = PyBytes_FromStringAndSize(<char*>result.outcomes.data(), <Py_ssize_t>result.outcomes.size())
        return result.ticket, outcomes, _packed(result.extents)

    def reserve_batch(self, LoadRequest request not None, numbers):
        cdef LoadBatch made = LoadBatch.__new__(LoadBatch, MADE_HERE)
        cdef CLoadBatch* batch = made.batch.get()
        cdef vector[uint32_t] wanted = _indices(numbers)
        cdef Status status
        cdef size_t i
        cdef int why
        for i in range(wanted.size()):
            if wanted[i] >= request.request.n_keys or (i and wanted[i] <= wanted[i - 1]):
                raise ValueError(f"numbers: must ascend below {request.request.n_keys}, got {wanted[i]}")
        with nogil:
            status = batch.reserve(self.pool, request.request, U32Span(wanted.data(), wanted.size()))
        raise_for(status, POOL)
        made.numbers = [batch.numbers[i] for i in range(batch.numbers.size())]
        made.present = [batch.present[i] for i in range(batch.present.size())]
        made.holds = [_wrap_hold(batch.holds[i]) for i in range(batch.holds.size())]
        why = <int>batch.refusal.why
        made.refusal = (batch.refusal.chunk, why) if why else None
        return made

    def commit(self, uint64_t ticket, indices, check=True):
        cdef vector[uint32_t] numbers = _indices(indices)
        cdef vector[uint8_t] outcomes
        cdef cbool checked = bool(check)
        cdef Status status
        outcomes.resize(numbers.size())
        with nogil:
            status = self.pool.get().commit(
                ticket, U32Span(numbers.data(), numbers.size()), checked, outcomes.data()
            )
        raise_for(status, POOL)
        return PyBytes_FromStringAndSize(<char*>outcomes.data(), <Py_ssize_t>outcomes.size())

    def abort(self, uint64_t ticket, indices=None):
        cdef vector[uint32_t] numbers
        cdef cbool everything = indices is None
        cdef uint64_t count
        if indices is not None:
            numbers = _indices(indices)
        with nogil:
            count = self.pool.get().abort(ticket, U32Span(numbers.data(), numbers.size()), everything)
        return count

    def hold(self, key=None, uint64_t reserved_ticket=0, int64_t index=-1, identity=b""):
        cdef CHold hold
        cdef Status status
        cdef bytes raw
        cdef bytes root = _one_key(identity, "identity") if identity else b""
        cdef const uint8_t* wanted = <const uint8_t*>PyBytes_AS_STRING(root) if root else NULL
        if reserved_ticket:
            if index < 0:
                raise ValueError(f"index: must name an item of the reservation, got {index}")
            status = self.pool.get().hold_reserved(reserved_ticket, <uint64_t>index, &hold)
        else:
            raw = _one_key(key, "key")
            status = self.pool.get().hold(CKey.load(PyBytes_AS_STRING(raw)), wanted, &hold)
        if status.code() == StatusCode.kNotFound:
            return None
        raise_for(status, POOL)
        return _wrap_hold(hold)

    def hold_batch(self, keys, uint64_t limit_bytes):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[CHold] holds
        cdef bytes left_out = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>n_keys)
        cdef uint8_t* why = <uint8_t*>PyBytes_AS_STRING(left_out)
        cdef Status status
        cdef size_t i
        holds.resize(n_keys)
        with nogil:
            status = self.pool.get().hold_batch(batch.data(), n_keys, limit_bytes, holds.data(), why)
        raise_for(status, POOL)
        return [_wrap_hold(holds[i]) for i in range(n_keys) if why[i] == 0], left_out

    @property
    def counted_bytes(self):
        return self.pool.get().counted_bytes()

    # administration

    def remove(self, keys):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef uint64_t count
        with nogil:
            count = self.pool.get().remove(batch.data(), n_keys)
        return count

    def clear(self, int64_t tenant=-1):
        cdef ClearResult result
        with nogil:
            result = self.pool.get().clear(tenant)
        return result.dropped, result.kept

    def cleared_in_use(self, int64_t tenant=-1):
        cdef ClearedInUse in_use
        with nogil:
            in_use = self.pool.get().cleared_in_use(tenant)
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

    def begin_changes(self):
        cdef Status status
        with nogil:
            status = self.pool.get().changes().begin()
        raise_for(status, POOL)
        return self.pool.get().changes().fd()

    def note_changes(self, uint16_t tier, unsigned char change, keys):
        cdef uint64_t cleared = 0
        cdef bytes named = bytes(keys)
        cdef const char* words = named
        cdef size_t n = len(named) // KEY_BYTES
        if len(named) % KEY_BYTES or change > 2 or (change == 2) != (n == 0):
            raise ValueError(f"keys: {len(named)} bytes for change {change}; give whole keys, and none for a clear")
        with nogil:
            if change == 2:
                self.pool.get().changes().note_all(tier, <Change>change, &cleared, 1, 1)
            else:
                self.pool.get().changes().note_all(tier, <Change>change, <const uint64_t*>words, n, KEY_BYTES // 8)

    @property
    def next_change(self):
        return self.pool.get().changes().next()

    def changes(self, uint64_t cursor, size_t limit):
        cdef ChangedTiers changed
        cdef cbool is_kept
        with nogil:
            is_kept = self.pool.get().changes().read(cursor, limit, &changed)
        if not is_kept:
            return None
        return changed.next, [
            (
                changed.tiers[i].tier,
                changed.tiers[i].cleared,
                PyBytes_FromStringAndSize(<char*>changed.tiers[i].gone.data(), <Py_ssize_t>(8 * changed.tiers[i].gone.size())),
                PyBytes_FromStringAndSize(<char*>changed.tiers[i].came.data(), <Py_ssize_t>(8 * changed.tiers[i].came.size())),
            )
            for i in range(changed.tiers.size())
        ]

    def has_changes(self, uint64_t cursor):
        return self.pool.get().changes().wait(cursor)

    def drain_changes(self):
        self.pool.get().changes().drain()

    def stats(self):
        cdef PoolStats stats
        with nogil:
            stats = self.pool.get().stats()
        return stats_dict(stats)

    def heartbeat(self):
        self.pool.get().heartbeat()

    def set_has_l2(self, has_l2):
        self.pool.get().set_flag(FLAG_HAS_L2, bool(has_l2))

    def set_has_promises(self, has_promises):
        self.pool.get().set_flag(FLAG_PROMISES, bool(has_promises))

    def retry_missing(self):
        cdef uint64_t missing
        with nogil:
            missing = self.pool.get().retry_missing()
        return missing

    def prefault_start(self, uint32_t threads):
        cdef Status status
        with nogil:
            status = self.pool.get().prefault_start(threads)
        raise_for(status, POOL)

    @property
    def prefaulted_bytes(self):
        return self.pool.get().prefault().done_bytes()

    def close(self):
        with nogil:
            self.pool.get().close()

    def validate(self):
        cdef Status status
        with nogil:
            status = self.pool.get().validate()
        raise_for(status, POOL)
