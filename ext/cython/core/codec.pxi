# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# Transformations of payloads for the codec wrapper.

cdef extern from "codec/planes.h" namespace "kvstrata" nogil:
    const char* c_planes_path "kvstrata::planes_path"()
    void c_split_planes "kvstrata::split_planes"(void* planes, const void* bytes, size_t n)
    void c_join_planes "kvstrata::join_planes"(void* bytes, const void* planes, size_t n)


cdef extern from "codec/fp8.h" namespace "kvstrata" nogil:
    Status c_fp8_encode "kvstrata::fp8_encode"(
        const Fp8Shape& shape, Fp8Source type, const void* numbers, void* codes, void* scales)
    void c_fp8_decode "kvstrata::fp8_decode"(
        const Fp8Shape& shape, Fp8Source type, const void* codes, const void* scales, void* numbers)


cdef int two_buffers(object out, object source, Py_buffer* to, Py_buffer* of) except -1:
    PyObject_GetBuffer(out, to, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(source, of, PyBUF_SIMPLE)
    except BaseException:
        PyBuffer_Release(to)
        raise
    cdef size_t a = <size_t>to.buf
    cdef size_t b = <size_t>of.buf
    if to.len != of.len or (a < b + <size_t>of.len and b < a + <size_t>to.len):
        PyBuffer_Release(to)
        PyBuffer_Release(of)
        raise ValueError(f"out: must have {of.len} bytes, not {to.len}, and must not overlap the source")
    return 0


def split_planes(out, source):
    cdef Py_buffer to, of
    two_buffers(out, source, &to, &of)
    try:
        with nogil:
            c_split_planes(to.buf, of.buf, of.len)
    finally:
        PyBuffer_Release(&to)
        PyBuffer_Release(&of)


def join_planes(out, source):
    cdef Py_buffer to, of
    two_buffers(out, source, &to, &of)
    try:
        with nogil:
            c_join_planes(to.buf, of.buf, of.len)
    finally:
        PyBuffer_Release(&to)
        PyBuffer_Release(&of)


def planes_path():
    return c_planes_path().decode()


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


def fp8_encode(shape, dtype, numbers, codes, scales):
    cdef Fp8Shape checked = read_shape(shape)
    cdef Fp8Source kind = source_type(dtype)
    cdef const unsigned char[::1] of = numbers
    cdef unsigned char[::1] to = codes
    cdef unsigned char[::1] by = scales
    cdef size_t n = checked.numbers()
    cdef Status status
    if <size_t>of.shape[0] != 2 * n or <size_t>to.shape[0] != n or <size_t>by.shape[0] != 4 * checked.scales():
        raise ValueError(f"numbers, codes, scales: {of.shape[0]}, {to.shape[0]}, {by.shape[0]} bytes do not fit the shape")
    if <size_t>&of[0] % 2:
        raise ValueError("numbers: must lie at an even address")
    with nogil:
        status = c_fp8_encode(checked, kind, &of[0], &to[0], &by[0])
    if status.code() == StatusCode.kUnsupported:
        return False
    raise_for(status, CALL)
    return True


def fp8_decode(shape, dtype, codes, scales, numbers):
    cdef Fp8Shape checked = read_shape(shape)
    cdef Fp8Source kind = source_type(dtype)
    cdef const unsigned char[::1] of = codes
    cdef const unsigned char[::1] by = scales
    cdef unsigned char[::1] to = numbers
    cdef size_t n = checked.numbers()
    if <size_t>to.shape[0] != 2 * n or <size_t>of.shape[0] != n or <size_t>by.shape[0] != 4 * checked.scales():
        raise ValueError(f"codes, scales, numbers: {of.shape[0]}, {by.shape[0]}, {to.shape[0]} bytes do not fit the shape")
    if <size_t>&to[0] % 2:
        raise ValueError("numbers: must lie at an even address")
    with nogil:
        c_fp8_decode(checked, kind, &of[0], &by[0], &to[0])
