# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""The parts of a pool that its clients map: its index and its extents. See index.pyi for the contract."""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libcpp.vector cimport vector

import os

from arguments cimport spans_of
from buffers cimport BorrowedBuffer, borrow
from core_pool cimport CIndexReader, FormatMismatch, Mapping, id_bytes, u32_span
from core_status cimport Status
from kvstrata.native.status cimport POOL, raise_for, raise_for_format

from kvstrata.native.pool import PoolError, PoolFormatError

cdef Py_ssize_t KEY_BYTES = 32


cdef class IndexReader:
    """See index.pyi."""

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
        return self.reader.peek_windows(batch.data(), n_keys // each.size(), u32_span(each.data(), each.size()))

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
    """See index.pyi."""

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
