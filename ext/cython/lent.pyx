# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""Holds in an adapter host: see lent.pyi for the contract."""

from cpython.buffer cimport PyBuffer_FillInfo

from kvstrata.native.index cimport ExtentsMap

from kvstrata.native.pool import PoolError


cdef class LentHold:
    """See lent.pyi."""

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
