# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The parts of a pool that its clients and adapter hosts map.

cdef extern from "memory/page_tables.h" namespace "kvstrata" nogil:
    Status c_map_present_pages "kvstrata::map_present_pages"(uint8_t*, uint64_t, uint64_t*) noexcept


cdef class IndexReader:
    """A client's read-only mapping of the index; not inherited by forks. The descriptor may be closed afterwards."""

    cdef CIndexReader reader

    def __init__(self, int index_fd) -> None:
        """Raises PoolFormatError when the file is no index of this format."""
        cdef FormatMismatch mismatch
        cdef Status status = CIndexReader.open(index_fd, &self.reader, &mismatch)
        raise_for_format(status, POOL, mismatch.field, mismatch.found, mismatch.expected)

    cdef int _check(self) except -1:
        if not self.reader.is_open():
            raise PoolError("the index reader was closed", reason="closed")
        return 0

    def peek(self, keys: Buffer, size_t n_slices=1) -> int:
        """Leading chunks READY in all slices; 0 when the server's heartbeat is older than 1 s.

        Takes microseconds and asks no other process.  The answer promises nothing: the chunks may be evicted at any
        time, so a caller sends a lookup before it reads them.
        """
        # Keeps the GIL for these microseconds: getting it back could take a whole switch interval.
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        self._check()
        return self.reader.peek(batch.data(), n_keys, n_slices)

    def peek_windows(self, keys: Buffer, spans: Sequence[int]) -> int:
        """The most leading chunks whose last `span` chunks are READY in each slice, by the slices' `spans` (above 0).

        `keys` are chunk-major, len(spans) for each chunk.  0 when the server's heartbeat is older than 1 s.
        """
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[uint32_t] each = spans_of(spans, n_keys)
        self._check()
        return self.reader.peek_windows(batch.data(), n_keys // each.size(), U32Span(each.data(), each.size()))

    @property
    def epoch(self) -> int:
        self._check()
        return self.reader.epoch()

    @property
    def pool_id(self) -> bytes:
        self._check()
        return (<char*>self.reader.pool_id().data())[:16]

    @property
    def heartbeat_age_s(self) -> float:
        self._check()
        cdef uint64_t age = self.reader.heartbeat_age_ns()
        return float("inf") if age == 0xFFFFFFFFFFFFFFFF else age * 1e-9

    @property
    def has_l2(self) -> bool:
        self._check()
        return bool(self.reader.has(FLAG_HAS_L2))

    @property
    def has_promises(self) -> bool:
        self._check()
        return bool(self.reader.has(FLAG_PROMISES))

    @property
    def extents_bytes(self) -> int:
        self._check()
        return self.reader.extents_bytes()

    def close(self) -> None:
        """Close it only while no peek runs. Idempotent; every later use raises PoolError."""
        self.reader.close()


cdef class ExtentsMap:
    """A client's mapping of the extents; not inherited by forks. Without `writable`, a write into it is a SIGSEGV."""

    def __init__(self, int extents_fd, length: int, writable: bool = True) -> None:
        """PoolFormatError when the file is shorter than `length`."""
        if length <= 0:
            raise ValueError(f"length: must be positive, got {length}")
        size = os.fstat(extents_fd).st_size
        if size < length:
            raise PoolFormatError("extents_file_bytes", size, length)
        cdef Status status = Mapping.map(extents_fd, length, bool(writable), True, &self.mapping)
        raise_for(status, POOL)
        self.length = length
        self.writable = bool(writable)

    @property
    def address(self) -> int:
        if self.mapping.address() == NULL:
            raise PoolError("the extents map was closed", reason="closed")
        return <size_t>self.mapping.address()

    def view(self, offset: int, length: int) -> memoryview:
        """The bytes of one extent. Raises ValueError when the extent leaves the map."""
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"extent {offset}+{length} leaves the pool of {self.length} bytes")
        return memoryview(self)[offset : offset + length]

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self.mapping.address() == NULL:
            raise PoolError("the extents map was closed", reason="closed")
        PyBuffer_FillInfo(buffer, self, self.mapping.address(), <Py_ssize_t>self.length, not self.writable, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.exports -= 1

    def close(self) -> None:
        """Raises BufferError while views exist. Copies by address must have ended. Idempotent."""
        if self.exports:
            raise BufferError("cannot close an extents map while views of it exist")
        self.mapping.reset()


cdef class LentHold:
    """A hold in an adapter host: the pool's owner keeps its own hold until it is told that this one was dropped.

    Has the members of `Hold`, except `tenant`.  The hold is dropped by `drop()`, by leaving a `with`
    block, or with the object; `dropped` is called once, in the thread that drops it, and must not raise.
    """

    cdef ExtentsMap extents
    cdef readonly bytes key
    cdef readonly size_t offset
    cdef readonly size_t length
    cdef readonly size_t address
    cdef bint writable
    cdef object dropped

    def __init__(
        self, ExtentsMap extents not None, bytes key, offset: int, length: int, *, bint writable,
        dropped: Callable[[], None]
    ) -> None:
        """Raises ValueError when the extent leaves the map."""
        if offset < 0 or length < 0 or offset + length > extents.length:
            raise ValueError(f"extent {offset}+{length} leaves the pool of {extents.length} bytes")
        self.address = <size_t>extents.address + <size_t>offset
        self.extents, self.key, self.offset, self.length = extents, key, offset, length
        self.writable, self.dropped = writable, dropped

    def drop(self) -> None:
        """Idempotent."""
        dropped, self.dropped = self.dropped, None
        if dropped is not None:
            dropped()

    def view(self) -> memoryview:
        """The record's bytes; writable only for a load. Raises PoolError after `drop()`."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def __del__(self):
        self.drop()

    def __repr__(self):
        state = "" if self.dropped is not None else " dropped"
        return f"<LentHold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"


def map_present_pages(address: int, length: int) -> int:
    """Enter the existing pages of [address, address + length) into this process's page tables; returns their bytes.

    Pages that nobody has touched yet stay untouched. Contents do not change. Drops the GIL; takes 0.1 to 0.3 µs a page.
    REQUIRES: one shared, writable mapping covers the range until this function returns.
    Raises ValueError if `address` does not begin a page, OSError if the kernel refuses.
    """
    cdef uintptr_t begin = address
    cdef uint64_t size = length
    cdef uint64_t mapped = 0
    cdef Status status
    with nogil:
        status = c_map_present_pages(<uint8_t*>begin, size, &mapped)
    raise_for(status, CALL)
    return mapped
