# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# The parts of a pool that its clients and adapter hosts map.

cdef extern from "memory/page_tables.h" namespace "kvstrata" nogil:
    Status c_map_present_pages "kvstrata::map_present_pages"(uint8_t*, uint64_t, uint64_t*) noexcept


cdef class IndexReader:
    cdef CIndexReader reader

    def __init__(self, int index_fd):
        cdef FormatMismatch mismatch
        cdef Status status = CIndexReader.open(index_fd, &self.reader, &mismatch)
        raise_for_format(status, POOL, mismatch.field, mismatch.found, mismatch.expected)

    cdef int _check(self) except -1:
        if not self.reader.is_open():
            raise PoolError("the index reader was closed", reason="closed")
        return 0

    def peek(self, keys, size_t n_slices=1):
        # Keeps the GIL for these microseconds: getting it back could take a whole switch interval.
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        if n_slices == 0:
            raise ValueError("n_slices: must be positive")
        self._check()
        return self.reader.peek(batch.data(), n_keys, n_slices)

    def peek_windows(self, keys, spans):
        cdef BorrowedBuffer batch
        cdef size_t n_keys = borrow(batch, keys, KEY_BYTES, "keys")
        cdef vector[uint32_t] each = spans_of(spans, n_keys)
        self._check()
        return self.reader.peek_windows(batch.data(), n_keys // each.size(), U32Span(each.data(), each.size()))

    @property
    def epoch(self):
        self._check()
        return self.reader.epoch()

    @property
    def pool_id(self):
        self._check()
        return (<char*>self.reader.pool_id().data())[:16]

    @property
    def heartbeat_age_s(self):
        self._check()
        cdef uint64_t age = self.reader.heartbeat_age_ns()
        return float("inf") if age == 0xFFFFFFFFFFFFFFFF else age * 1e-9

    @property
    def has_l2(self):
        self._check()
        return bool(self.reader.has(FLAG_HAS_L2))

    @property
    def has_promises(self):
        self._check()
        return bool(self.reader.has(FLAG_PROMISES))

    @property
    def extents_bytes(self):
        self._check()
        return self.reader.extents_bytes()

    def close(self):
        self.reader.close()


cdef class ExtentsMap:
    def __init__(self, int extents_fd, length, writable=True):
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
        PyBuffer_FillInfo(buffer, self, self.mapping.address(), <Py_ssize_t>self.length, not self.writable, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.exports -= 1

    def close(self):
        if self.exports:
            raise BufferError("cannot close an extents map while views of it exist")
        self.mapping.reset()


cdef class LentHold:
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
        state = "" if self.dropped is not None else " dropped"
        return f"<LentHold {self.key.hex()[:12]} at {self.offset}+{self.length}{state}>"


def map_present_pages(address, length):
    cdef uintptr_t begin = address
    cdef uint64_t size = length
    cdef uint64_t mapped = 0
    cdef Status status
    with nogil:
        status = c_map_present_pages(<uint8_t*>begin, size, &mapped)
    raise_for(status, CALL)
    return mapped
