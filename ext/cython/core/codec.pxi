# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Transformations of payloads for codecs (`docs/internals/formats.md`). They run without the GIL. All buffers stay the caller's.

cdef extern from "codec/planes.h" namespace "kvstrata" nogil:
    void c_split_planes "kvstrata::split_planes"(void* planes, const void* bytes, size_t n)
    void c_join_planes "kvstrata::join_planes"(void* bytes, const void* planes, size_t n)


cdef int two_buffers(object out, object source, BorrowedBuffer& to, BorrowedBuffer& of) except -1:
    to.take_writable(out)
    of.take(source)
    cdef size_t a = <size_t>to.data()
    cdef size_t b = <size_t>of.data()
    if to.bytes() != of.bytes() or (a < b + <size_t>of.bytes() and b < a + <size_t>to.bytes()):
        raise ValueError(f"out: must have {of.bytes()} bytes, not {to.bytes()}, and must not overlap the source")
    return 0


def split_planes(out: Buffer, source: Buffer) -> None:
    """Writes bytes 0, 2, 4, … of `source` to `out`, then bytes 1, 3, 5, …

    Raises ValueError if the two buffers overlap or differ in length.
    """
    cdef BorrowedBuffer to, of
    two_buffers(out, source, to, of)
    with nogil:
        c_split_planes(to.writable(), of.data(), of.bytes())


def join_planes(out: Buffer, source: Buffer) -> None:
    """The inverse of `split_planes`; raises as it does."""
    cdef BorrowedBuffer to, of
    two_buffers(out, source, to, of)
    with nogil:
        c_join_planes(to.writable(), of.data(), of.bytes())
