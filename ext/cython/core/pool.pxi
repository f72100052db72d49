# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The L1 pool in shared memory, for its server.
#
# 1. An extent is given out again only when nobody can touch its bytes any more: no hold, lease or reservation is left,
#    and every process of an earlier epoch that may touch them is gone or has quiesced.  No clock is involved.
# 2. Only `commit` makes bytes visible, and only an unpinned leaf of the prefix tree (or a whole old slab with its
#    descendants) is evicted to make room.
# 3. Keys are concatenated in one bytes-like object, 32 bytes each; any other length raises ValueError.
# 4. Every method may be called from any thread.
#
# After `close()` every method raises PoolError with reason `closed`, or answers like an empty pool; holds stay
# valid until they are dropped.

cdef enum:
    EXTENT_BYTES = 24
    MAX_ROWS = 1024

# Processes that can be attached to a pool at a time.
MAX_SESSIONS: int = MAX_ROWS - 1
# Tenants that a pool has quotas for.
MAX_QUOTAS: int = kMaxQuotas


class PoolError(SegmentError):
    """The pool refused a call. `reason` is a stable word: sessions_full, closed, not_found, internal, …"""

    reason: str

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message, field=reason)
        self.reason = reason


class PoolFormatError(SegmentError):
    """The files hold no pool that this version can adopt; `field` names what differs. Nothing was changed."""

    found: int
    expected: int

    def __init__(self, field: str, found: int, expected: int) -> None:
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


class Row(TypedDict):
    """An attached process. `old`: claimed in an earlier epoch and not quiesced yet.

    `registers_memory`: a device may access the extents on its behalf.
    """

    row: int
    session: bytes
    group: bytes
    pid: int
    old: bool
    registers_memory: bool


cdef class Hold:
    """A reference on an extent: while it lives, the bytes belong to `key`. Comes from `Pool.hold`.

    Dropped by `drop()`, by leaving a `with` block, or with the object; any thread may do it.  The address stays
    mapped as long as the object (or a view of it) lives, but after `drop()` the bytes may become another chunk's.
    """

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("a Hold comes from Pool.hold()")

    @property
    def key(self) -> bytes:
        return _key_bytes(self.held.get().key())

    @property
    def offset(self) -> int:
        """Bytes from the start of the extents file."""
        return self.held.get().offset()

    @property
    def length(self) -> int:
        """Bytes of the record."""
        return self.held.get().length()

    @property
    def tenant(self) -> int:
        """Number of the tenant for whom the bytes are counted."""
        return self.held.get().tenant()

    @property
    def address(self) -> int:
        """Where the record lies in this process."""
        return <size_t>self.held.get().address()

    def drop(self) -> None:
        """Idempotent."""
        with nogil:
            self.held.get().drop()

    def uncount(self) -> None:
        """Stop counting the bytes against the limit of `hold_batch`, though they are still held. `drop` does it too."""
        self.held.get().uncount()

    def view(self) -> memoryview:
        """The record's bytes; writable only for an item of a reservation. Raises PoolError after `drop()`."""
        if not self.held.get().is_held():
            raise PoolError("the hold was dropped", reason="closed")
        return memoryview(self)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        cdef CHold* hold = self.held.get()
        PyBuffer_FillInfo(buffer, self, hold.address(), hold.length(), 0 if hold.is_reservation() else 1, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def __repr__(self):
        state = "" if self.held.get().is_held() else " dropped"
        return f"<Hold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"


cdef Hold _wrap_hold(CHold& hold):
    cdef Hold result = Hold.__new__(Hold, MADE_HERE)
    result.held = make_shared[CHold](move(hold))
    return result


cdef class LoadRequest:
    """A prompt whose records are loaded.

    `keys` are those of all chunks, chunk-major: key number i is that of chunk i // n_slices, slice i % n_slices.
    `parents`: the keys before chunk 0, one a slice, or b"".  `room_bytes`: for each slice the room for a record.  Each
    record may be shorter than its room, as a `tail` is.
    """

    cdef CLoadRequest request
    cdef BorrowedBuffer keys

    def __init__(
        self, keys: Buffer, parents: bytes, room_bytes: Sequence[int], identity: bytes, tenant: int = 0,
        cbool tail=False
    ) -> None:
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
    """Reservations of the server for records that are loaded; what is not finished is given back with the object."""

    cdef unique_ptr[CLoadBatch] batch
    # The reserved keys, a hold for each of them, and the keys that are in the pool already.
    cdef readonly list numbers  # list[int]
    cdef readonly list holds  # list[Hold]
    cdef readonly list present  # list[int]
    # The first chunk that could not be reserved, and its wire.ReserveOutcome; None if there is none.
    cdef readonly object refusal  # tuple[int, int] | None

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("a LoadBatch comes from Pool.reserve_batch()")
        self.batch.reset(new CLoadBatch())

    def finish(self, loaded: Buffer) -> bytes:
        """Commit the items whose byte in `loaded` is not 0, as `Pool.commit` with `check`, and give back the others.

        For each item its wire.CommitOutcome, or 255 if it was given back.  Extents in use stay in quarantine.
        """
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
    """A cache without bytes under the pool's eviction policy, through which logged requests pass. Not thread-safe."""

    cdef unique_ptr[CShadow] shadow

    def __cinit__(
        self, *, capacity: int, policy: str = "VALUE", depth_cost: float = 0.0085, refuses: bool = True,
        size_t engine_chunks=0, cbool late=False
    ) -> None:
        """`capacity`: chunks. `policy`: VALUE or LRU. `refuses`: as without an L2. Raises ValueError.

        With `engine_chunks`, an engine with a cache of so many chunks asks, whose hits count too; `late`: chunks are
        stored when that cache loses them.
        """
        if not 1 <= capacity <= 1 << 30:
            raise ValueError(f"capacity: must be between 1 and {1 << 30} chunks, got {capacity}")
        if policy not in ("VALUE", "LRU"):
            raise ValueError(f"policy: must be VALUE or LRU, got {policy!r}")
        self.shadow.reset(new CShadow(capacity, policy.encode(), depth_cost, refuses, engine_chunks, late))

    def replay(self, bytes log) -> bool:
        """Requests as `Pool.take_requests` returns them; False if the last one is incomplete. Releases the GIL."""
        cdef string requests = log
        cdef cbool complete
        with nogil:
            complete = self.shadow.get().replay(requests)
        return complete

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """Chunks, hits among them, and both in costs (units of a prompt's first chunk)."""
        cdef ShadowSums sums = self.shadow.get().sums()
        return sums.chunks, sums.hit_chunks, sums.cost, sums.hit_cost


cdef class Pool:
    """The one writer of a segment. Descriptors passed in stay the caller's and may be closed afterwards."""

    def __cinit__(self, made=None):
        if made is not MADE_HERE:
            raise TypeError("a Pool comes from Pool.create() or Pool.adopt()")

    @staticmethod
    def create(
        int index_fd, int extents_fd, *, extents_bytes: int, entry_capacity: int, policy: str = "VALUE",
        max_session_share: int = 8, depth_cost: float = 0.0085, lessons: bytes = b""
    ) -> Pool:
        """Makes a pool in two empty files and sizes them.

        `extents_bytes`: a multiple of 4096.  `entry_capacity`: most extents (144 bytes of index each).
        `policy`: VALUE, LRU, or noop (never evicts).  `depth_cost`: by which share of the first chunk's cost each
        further chunk of a prompt costs more to compute than the one before it.  `lessons`: those of an earlier pool.
        The reserved and quarantined extents of one row may take at
        most 1/`max_session_share` of the pool, but one extent is always allowed.
        Raises ValueError naming a bad option, OSError when a file cannot be sized or mapped.
        """
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
    def adopt(
        int index_fd, int extents_fd, *, policy: str = "VALUE", max_session_share: int = 8,
        extents_bytes: int = 0, entry_capacity: int = 0, depth_cost: float = 0.0085, lessons: bytes = b""
    ) -> Pool:
        """Takes over the pool that another server left, in a new epoch.

        Committed entries become UNVERIFIED; extents that processes of earlier epochs may touch are kept from eviction
        and reuse until `row_gone` or `row_quiesced`.  Quotas have to be set again.  Sizes other than 0 must be those
        of the files.
        Raises PoolFormatError when the files are no pool of this format; damaged entries are dropped.
        """
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
    def epoch(self) -> int:
        return self.pool.get().epoch()

    @property
    def pool_id(self) -> bytes:
        return (<char*>self.pool.get().pool_id().data())[:16]

    @property
    def extents_bytes(self) -> int:
        return self.pool.get().extents_bytes()

    @property
    def extents_address(self) -> int:
        """The server's own mapping of the extents, valid until the pool and its last hold are gone."""
        return <size_t>self.pool.get().extents_address()

    # the policy

    def learn(self) -> bool:
        """Learns what is worth keeping from the requests since the last time, in milliseconds; False: too few."""
        cdef cbool learnt
        with nogil:
            learnt = self.pool.get().learn()
        return learnt

    def missed(self, keys: bytes, size_t n_slices=1, uint32_t tenant=0) -> None:
        """A request that found none of these chunks in the index, and sent no lookup; keys of its first slice."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef const uint8_t* data = batch.data()
        with nogil:
            self.pool.get().missed(data, n_keys, n_slices, tenant)

    def hint(self, keys: bytes, uint8_t next) -> int:
        """Says what comes next (`types.Next`) after a request that used the first of these chunks that is present, and
        those before it in its prompt. How many those are.
        """
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef const uint8_t* data = batch.data()
        cdef size_t hinted
        with nogil:
            hinted = self.pool.get().hint(data, n_keys, next)
        return hinted

    def log_requests(self, uint64_t salt) -> None:
        """From now on logs requests for `take_requests`, the keys mixed with the random number `salt`."""
        self.pool.get().request_log().start(salt)

    def take_requests(self) -> bytes:
        """The requests since the last call, at most 64 MiB: docs/internals/formats.md has the form."""
        return self.pool.get().request_log().take()

    def forecasts(
        self
    ) -> tuple[list[tuple[float, float, float]], list[tuple[int | None, int, float, list[tuple[float, float, float]]]]]:
        """What requests of late would have hit in a pool of another size, and with other shares of tenants.

        Sizes are (size ÷ the present one, share of chunks, share of prefill seconds).  Those of the pool are told by a
        sample of the chunks and the pool's own policy, and are empty as long as nothing is known.  Then come the
        tenants with most requests of late, at most 16, and all others together (None): (tenant, bytes in the pool, its
        part of the prefill seconds that all requests would take without a cache, sizes of its share).  A share has
        the tenant's chunks that were used last.  No sizes of a share in which the sample has fewer than 128
        chunks.
        """
        cdef Forecasts found
        with nogil:
            found = self.pool.get().forecasts()
        return _sizes(found.sizes), [
            (None if one.is_rest else one.tenant, one.bytes, one.part, _sizes(one.sizes)) for one in found.tenants
        ]

    def lessons(self) -> bytes:
        """All that was learnt, at most 1 MiB, for a later pool. It names no prompt."""
        return self.pool.get().lessons()

    @staticmethod
    def are_lessons(bytes lessons) -> bool:
        return CPool.are_lessons(lessons)

    def set_model(self, identity: bytes, uint8_t model) -> None:
        """From now on the chunks of an identity have the costs of this model, 0 to 3; 0 is that of all others."""
        self.pool.get().set_model(CKey.load(PyBytes_AS_STRING(_one_key(identity, "identity"))), model)

    def set_cost(self, uint8_t model, double cost) -> None:
        """A chunk of this model costs so many times as much, per byte, as an average one of its depth."""
        self.pool.get().set_cost(model, cost)

    def set_time(self, monotonic_ns: int) -> None:
        """For a replay: the policy's time is this from now on, not the clock's."""
        self.pool.get().set_time(monotonic_ns)

    # rows

    def claim_row(self, session: bytes, group: bytes, pid: int, registers_memory: bool = False) -> int:
        """The row of a session, the old one if the session has one. Raises PoolError `sessions_full`.

        `session` and `group` are ids of 16 bytes.  Once true, a row's `registers_memory` stays true.
        """
        cdef const uint8_t* session_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(session, "session"))
        cdef const uint8_t* group_bytes = <const uint8_t*>PyBytes_AS_STRING(_id16(group, "group"))
        cdef uint32_t row = 0
        cdef Status status = self.pool.get().claim_row(
            session_bytes, group_bytes, pid, registers_memory, &row
        )
        raise_for(status, POOL)
        return row

    def rows(self) -> list[Row]:
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

    def row_gone(self, row: int) -> None:
        """The process is dead: ends its reservations, its shares of leases, its quarantine, and frees the row."""
        cdef uint32_t number = _row(row)
        cdef Status status
        with nogil:
            status = self.pool.get().row_gone(number)
        raise_for(status, POOL)

    def row_stranded(self, row: int) -> int:
        """As `row_gone`, for a process on whose behalf a device may still write; returns the bytes left in quarantine.

        Extents quarantined because of the row stay in quarantine.  While any are left, the row stays claimed, over
        restarts too, until `row_gone`.
        """
        cdef uint32_t number = _row(row)
        cdef uint64_t kept_bytes = 0
        cdef Status status
        with nogil:
            status = self.pool.get().row_stranded(number, &kept_bytes)
        raise_for(status, POOL)
        return kept_bytes

    def row_quiesced(self, row: int) -> None:
        """The live process touches nothing of earlier epochs any more."""
        cdef uint32_t number = _row(row)
        cdef Status status
        with nogil:
            status = self.pool.get().row_quiesced(number)
        raise_for(status, POOL)

    # reading

    def peek(self, keys: Buffer, size_t n_slices=1) -> int:
        """Leading chunks READY in all slices. Takes no lock."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        return self.pool.get().peek(batch.data(), n_keys, n_slices)

    def has(self, keys: Buffer) -> bytes:
        """For each key 1 if it is READY, else 0. Takes no lock."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef bytes answers = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>n_keys)
        self.pool.get().has(batch.data(), n_keys, <uint8_t*>PyBytes_AS_STRING(answers))
        return answers

    def peek_windows(self, keys: Buffer, spans: Sequence[int]) -> int:
        """As `IndexReader.peek_windows`."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[uint32_t] each = spans_of(spans, n_keys)
        return self.pool.get().peek_windows(batch.data(), n_keys // each.size(), U32Span(each.data(), each.size()))

    def lease(
        self, keys: Buffer, size_t n_slices, rows: list[int], identity: bytes = b"",
        spans: Sequence[int] = (), cbool again=False, cbool unread=False, size_t own_chunks=0,
        uint32_t tenant=0
    ) -> tuple[int, int, bytes, int, int]:
        """(ticket, n_chunks, extents, unverified, short_bytes): pins the leading READY chunks for these rows.

        `extents`: n_chunks × n_slices packed `types.EXTENT`.  Ticket 0 when n_chunks is 0.  Trimmed where leased
        bytes would pass half of the pool; `short_bytes` is then what other leases would have to give back for the
        rest of the prefix.  `unverified` counts entries that `verify` must see before a longer answer is possible.
        Counts as a use of the chunks, but with `again` not as a return: the request leases them once more, or a peer.
        With `unread` UNVERIFIED chunks are leased like READY ones: no holder reads bytes by this lease.
        The first `own_chunks` chunks are in a cache of the caller's, which serves them: no use of them is counted.

        `spans`: for each slice 0 if every leading chunk must be READY in it, or how many of the last leading chunks
        must be; other chunks of such a slice are not leased, and their extents are zero.  () means 0 for all.

        `identity`, here and below: root of the identity for which the caller asks, b"" for any; entries of another
        identity count as absent.  `tenant`: whose request it is.
        """
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
        self, root: bytes, chain: Buffer, slices: Buffer, rows: list[int], spans: Sequence[int],
        size_t max_keys, cbool again=False, size_t own_chunks=0, uint32_t tenant=0
    ) -> tuple[int, int, bytes, int, int, bytes] | None:
        """As `lease` of `storage_keys(root, chain, slices)` and identity `root`; the keys are derived here.

        Those of slices with a span are derived only as far as the answer needs them.  None, and nothing is leased, if
        that takes more than `max_keys` keys.  The last item holds the keys of the slices without a span, chunk-major;
        it is b"" if all chunks are leased.
        """
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

    def release(self, uint64_t ticket, int64_t row=-1) -> bool:
        """Ends one row's share of a lease, or with row -1 all shares. False when no such share exists (any more)."""
        cdef cbool done
        with nogil:
            done = self.pool.get().release(ticket, row)
        return bool(done)

    def leases_to_end(self, tickets: Sequence[int], uint64_t need_bytes) -> int:
        """How many of these tickets, in this order, would have to end before `need_bytes` more can be leased.

        If all of them are not enough, the count ends with the last one that frees anything.  After 8,192 entries the
        search ends with those looked at.  Each ticket must be named once.  Changes nothing.
        """
        cdef vector[uint64_t] numbers
        cdef size_t count
        for ticket in tickets:
            numbers.push_back(ticket)
        with nogil:
            count = self.pool.get().leases_to_end(U64Span(numbers.data(), numbers.size()), need_bytes)
        return count

    def verify(self, keys: Buffer) -> tuple[int, int]:
        """(ok, bad): checks the UNVERIFIED entries among the keys and drops bad ones. Slow; runs without the GIL."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef uint64_t good = 0
        cdef uint64_t bad = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify(batch.data(), n_keys, &good, &bad)
        raise_for(status, POOL)
        return good, bad

    def verify_next(self, uint64_t max_bytes) -> int:
        """Checks unverified entries, last used first, at most about `max_bytes`; returns how many remain."""
        cdef uint64_t remaining = 0
        cdef Status status
        with nogil:
            status = self.pool.get().verify_next(max_bytes, &remaining)
        raise_for(status, POOL)
        return remaining

    def mark_bad(self, key: Buffer, identity: bytes = b"") -> bool:
        """Checks a record that a reader found wrong; True when it was bad and was dropped."""
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

    def is_tail(self, key: Buffer) -> bool:
        """Whether the key is in the index and its record is a tail."""
        cdef bytes raw = _one_key(key, "key")
        return bool(self.pool.get().is_tail(CKey.load(PyBytes_AS_STRING(raw))))

    def is_reserved(self, key: Buffer) -> bool:
        """Whether the chunk is being written, by a process or by a load."""
        cdef bytes raw = _one_key(key, "key")
        return bool(self.pool.get().is_reserved(CKey.load(PyBytes_AS_STRING(raw))))

    def reserve(
        self, keys: Buffer, parent: bytes, record_bytes: int, row: int, identity: bytes, tenant: int = 0,
        cbool tail=False, uint64_t extent_bytes=0
    ) -> tuple[int, bytes, bytes]:
        """(ticket, outcomes, extents): extents to write these chunks of one chain into, in order.

        `parent`: storage key of the chunk before the first, or b"".  `identity`: root that the records must name.  The
        answer has one wire.ReserveOutcome and one packed `types.EXTENT` for each key (zeros where not RESERVED).
        Entries are evicted at once to make room, never those of this chain.  After the first refusal, all later keys
        that are not present get the same outcome.  Ticket 0 when nothing was reserved.  A tail is evicted before all
        other records; it gets an extent of `extent_bytes`, if its record is shorter.
        """
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

    def reserve_batch(self, LoadRequest request not None, numbers: Sequence[int]) -> LoadBatch:
        """Extents for these keys of a prompt, whose numbers ascend, with a hold on each.

        As `reserve` for the server itself.  From the first refused chunk on, nothing is reserved in any slice.
        """
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

    def commit(self, uint64_t ticket, indices: list[int], check: bool = True) -> bytes:
        """One wire.CommitOutcome per index; the items' reservation ends, whatever the outcome.

        With `check` the record's header must be sound and name the key, the identity and exactly the reserved
        length, with its checksums computed; otherwise BAD_RECORD, and the extent is given back.
        """
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

    def abort(self, uint64_t ticket, indices: list[int] | None = None) -> int:
        """Gives items back (None: all that are left); returns how many. Extents in use stay in quarantine."""
        cdef vector[uint32_t] numbers
        cdef cbool everything = indices is None
        cdef uint64_t count
        if indices is not None:
            numbers = _indices(indices)
        with nogil:
            count = self.pool.get().abort(ticket, U32Span(numbers.data(), numbers.size()), everything)
        return count

    def hold(
        self, key: Buffer | None = None, uint64_t reserved_ticket=0, int64_t index=-1, identity: bytes = b""
    ) -> Hold | None:
        """A hold on a READY entry by key, or on an item of a reservation; None when there is none."""
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

    def hold_batch(self, keys: Buffer, uint64_t limit_bytes) -> tuple[list[Hold], bytes]:
        """Holds for puts on the READY entries among these keys, which count against a limit until `Hold.uncount`.

        An entry counts once, with the bytes of its extent, however many holds on it count.  The holds are in the keys'
        order.  For each key, the second result has 0 if there is a hold, 1 if the entry is absent, 2 if it would exceed
        the limit.
        """
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
    def counted_bytes(self) -> int:
        """Bytes of the extents that count against the limit of `hold_batch`."""
        return self.pool.get().counted_bytes()

    # administration

    def remove(self, keys: Buffer) -> int:
        """Drops READY and UNVERIFIED entries that nobody uses; returns how many."""
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef uint64_t count
        with nogil:
            count = self.pool.get().remove(batch.data(), n_keys)
        return count

    def clear(self, int64_t tenant=-1) -> tuple[int, int]:
        """Drops all entries (of one tenant); returns how many it dropped, and how many it kept.

        The extent of a dropped entry in use becomes free when its last use has ended.  Kept are the entries that the
        server itself leases: for a pin, or for another instance that reads them.
        """
        cdef ClearResult result
        with nogil:
            result = self.pool.get().clear(tenant)
        return result.dropped, result.kept

    def cleared_in_use(self, int64_t tenant=-1) -> tuple[int, int]:
        """(held, leased): numbers of entries that clears dropped and that a hold or a lease still keeps."""
        cdef ClearedInUse in_use
        with nogil:
            in_use = self.pool.get().cleared_in_use(tenant)
        return in_use.held, in_use.leased

    def ready_tags(self, uint64_t first, uint64_t max_entries) -> tuple[bytes, int]:
        """(the first 8 bytes of each READY key among the next entries from number `first` on, next `first`).

        The next `first` is 0 after the last entry.  Takes about 10 ns an entry, under the lock.  Entries that change
        meanwhile are in the changes.
        """
        cdef vector[uint64_t] tags
        cdef uint64_t following
        with nogil:
            following = self.pool.get().ready_tags(first, max_entries, &tags)
        return PyBytes_FromStringAndSize(<char*>tags.data(), <Py_ssize_t>(8 * tags.size())), following

    def set_quota(self, uint32_t tenant, int64_t quota_bytes) -> bool:
        """Protects so many bytes of a tenant from what others store; -1: none.

        False, and nothing changes, if too many tenants have quotas.
        """
        cdef bint is_set
        with nogil:
            is_set = self.pool.get().set_quota(tenant, quota_bytes)
        return is_set

    def take_verified(self) -> list[bytes]:
        """Keys of the chunks that were adopted from an earlier server and have become READY since the last call."""
        cdef vector[CKey] keys
        with nogil:
            keys = self.pool.get().take_verified()
        return [_key_bytes(keys[i]) for i in range(keys.size())]

    def begin_changes(self) -> int:
        """Returns the descriptor that signals `has_changes`, which the pool owns. Raises PoolError if there is none."""
        cdef Status status
        with nogil:
            status = self.pool.get().changes().begin()
        raise_for(status, POOL)
        return self.pool.get().changes().fd()

    def note_changes(self, uint16_t tier, unsigned char change, keys: bytes) -> None:
        """Notes a change (kvstrata.types.Change) of a tier other than L1, which is 0. `keys` are whole, concatenated.

        A clear has no keys.
        """
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
    def next_change(self) -> int:
        """Number of the next change: the cursor of a reader that wants only changes from now on."""
        return self.pool.get().changes().next()

    def changes(
        self, uint64_t cursor, size_t limit
    ) -> tuple[int, list[tuple[int, bool, bytes, bytes]]] | None:
        """At most `limit` changes from `cursor` on: (next cursor, [(tier, cleared, tags gone, tags that came)]).

        To be applied in this order: the clear, what has gone, what came.  No tag is named twice.  None: more than
        262,144 changes have happened since `cursor`, or it is not a cursor of this pool.  Takes about 20 ns a change.
        """
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

    def l1_changes(self, uint64_t cursor, size_t limit) -> tuple[int, list[tuple[int, bytes]]] | None:
        """Those of L1 among at most `limit` changes from `cursor` on: (next cursor, [(change, tag)]), in order.

        A change is a kvstrata.types.PoolChange.  None: see `changes`.
        """
        cdef vector[ChangeEntry] found
        cdef cbool is_kept
        cdef size_t i
        with nogil:
            is_kept = self.pool.get().changes().read(cursor, limit, &found)
        if not is_kept:
            return None
        return cursor + found.size(), [
            (<int>found[i].change, PyBytes_FromStringAndSize(<char*>&found[i].tag, 8))
            for i in range(found.size())
            if found[i].tier == 0
        ]

    def has_changes(self, uint64_t cursor) -> bool:
        """Whether `changes` has something to tell. If not, the descriptor becomes readable at the next change."""
        return self.pool.get().changes().wait(cursor)

    def drain_changes(self) -> None:
        """Makes the descriptor unreadable until it is signalled again."""
        self.pool.get().changes().drain()

    def stats(self) -> dict[str, Any]:
        """Bytes and entries by state, classes, evictions, refusals, tenants, fragmentation, …"""
        cdef PoolStats stats
        with nogil:
            stats = self.pool.get().stats()
        return stats_dict(stats)

    def heartbeat(self) -> None:
        """Tells clients that the server is alive; a second after the last heartbeat, every peek of theirs answers 0."""
        self.pool.get().heartbeat()

    def set_has_l2(self, has_l2: bool) -> None:
        """Tells the readers of the index whether the server has an L2 tier."""
        self.pool.get().set_flag(FLAG_HAS_L2, bool(has_l2))

    def set_has_promises(self, has_promises: bool) -> None:
        """Tells them whether any engine promises chunks now."""
        self.pool.get().set_flag(FLAG_PROMISES, bool(has_promises))

    def retry_missing(self) -> int:
        """Asks again for memory of L1 that the file system refused; returns the bytes that are still missing."""
        cdef uint64_t missing
        with nogil:
            missing = self.pool.get().retry_missing()
        return missing

    def prefault_start(self, uint32_t threads) -> None:
        """Starts `threads` threads that fault the extents in. Raises PoolError when it was called before."""
        cdef Status status
        with nogil:
            status = self.pool.get().prefault_start(threads)
        raise_for(status, POOL)

    @property
    def prefaulted_bytes(self) -> int:
        return self.pool.get().prefault().done_bytes()

    def close(self) -> None:
        """Ends prefaulting and all use; nothing writes to the index any more. Does not wait for holds. Idempotent."""
        with nogil:
            self.pool.get().close()
