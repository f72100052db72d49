# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Transformations of payloads for the codec wrapper.

cdef extern from "codec/planes.h" namespace "kvstrata" nogil:
    void c_split_planes "kvstrata::split_planes"(void* planes, const void* bytes, size_t n)
    void c_join_planes "kvstrata::join_planes"(void* bytes, const void* planes, size_t n)


cdef extern from "codec/fp8.h" namespace "kvstrata" nogil:
    Status c_fp8_encode "kvstrata::fp8_encode"(
        const Fp8Shape& shape, Fp8Source type, const void* numbers, void* codes, void* scales)
    void c_fp8_decode "kvstrata::fp8_decode"(
        const Fp8Shape& shape, Fp8Source type, const void* codes, const void* scales, void* numbers)


cdef int two_buffers(object out, object source, BorrowedBuffer& to, BorrowedBuffer& of) except -1:
    to.take_writable(out)
    of.take(source)
    cdef size_t a = <size_t>to.data()
    cdef size_t b = <size_t>of.data()
    if to.bytes() != of.bytes() or (a < b + <size_t>of.bytes() and b < a + <size_t>to.bytes()):
        raise ValueError(f"out: must have {of.bytes()} bytes, not {to.bytes()}, and must not overlap the source")
    return 0


def split_planes(out, source):
    cdef BorrowedBuffer to, of
    two_buffers(out, source, to, of)
    with nogil:
        c_split_planes(to.writable(), of.data(), of.bytes())


def join_planes(out, source):
    cdef BorrowedBuffer to, of
    two_buffers(out, source, to, of)
    with nogil:
        c_join_planes(to.writable(), of.data(), of.bytes())


cdef Fp8Source source_type(object dtype) except *:
    if dtype == 1:
        return Fp8Source.kBfloat16
    if dtype == 2:
        return Fp8Source.kFloat16
    raise ValueError(f"dtype: must be 1 (bfloat16) or 2 (float16), not {dtype!r}")


cdef Fp8Shape read_shape(object shape) except *:
    cdef Fp8Shape out
    cdef Status status
    out.blocks, out.groups, out.tokens, out.heads, out.dim = shape
    status = out.check()
    raise_for(status, CALL, f"{tuple(shape)!r:.100}: ")
    return out


cdef int check_lengths(
    Fp8Shape& shape, BorrowedBuffer& numbers, BorrowedBuffer& codes, BorrowedBuffer& scales
) except -1:
    cdef size_t n = shape.numbers()
    if <size_t>numbers.bytes() != 2 * n or <size_t>codes.bytes() != n or <size_t>scales.bytes() != 4 * shape.scales():
        raise ValueError(
            f"numbers, codes, scales: {numbers.bytes()}, {codes.bytes()}, {scales.bytes()} bytes do not fit the shape"
        )
    if <size_t>numbers.data() % 2:
        raise ValueError("numbers: must lie at an even address")
    return 0


def fp8_encode(shape, dtype, numbers, codes, scales):
    cdef Fp8Shape checked = read_shape(shape)
    cdef Fp8Source kind = source_type(dtype)
    cdef BorrowedBuffer of, to, by
    cdef Status status
    of.take(numbers)
    to.take_writable(codes)
    by.take_writable(scales)
    check_lengths(checked, of, to, by)
    with nogil:
        status = c_fp8_encode(checked, kind, of.data(), to.writable(), by.writable())
    if status.code() == StatusCode.kUnsupported:
        return False
    raise_for(status, CALL)
    return True


def fp8_decode(shape, dtype, codes, scales, numbers):
    cdef Fp8Shape checked = read_shape(shape)
    cdef Fp8Source kind = source_type(dtype)
    cdef BorrowedBuffer of, to, by
    of.take(codes)
    by.take(scales)
    to.take_writable(numbers)
    check_lengths(checked, to, of, by)
    with nogil:
        c_fp8_decode(checked, kind, of.data(), by.data(), to.writable())
