# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""Borrowed buffers of whole items, for calls that take batches as bytes."""

from libc.stddef cimport size_t


cdef extern from "buffers.h" namespace "kvstrata::python":
    cdef cppclass BorrowedBuffer:
        int take "borrow"(object) except -1
        int take_writable "borrow_writable"(object) except -1
        const unsigned char* data() noexcept nogil
        unsigned char* writable() noexcept nogil
        Py_ssize_t bytes() noexcept nogil


cdef inline size_t borrow(BorrowedBuffer& buffer, object values, Py_ssize_t item_bytes, str name) except? 0:
    """Borrows the buffer of `values` until `buffer` is destroyed, and returns its number of items. The address may have
    any alignment. Raises ValueError, which names the argument, unless the buffer holds whole items.
    """
    buffer.take(values)
    if buffer.bytes() % item_bytes:
        raise ValueError(f"{name}: must be a multiple of {item_bytes} bytes, not {buffer.bytes()}")
    return <size_t>(buffer.bytes() // item_bytes)
