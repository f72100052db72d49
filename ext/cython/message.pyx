# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, freethreading_compatible=False
"""A look at a MessagePack message before it is decoded: see message.pyi for the contract."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.tuple cimport PyTuple_GET_ITEM
from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef extern from "message/scan.h" namespace "kvstrata" nogil:
    enum class ScanFault(unsigned char):
        pass
    const uint32_t kMaxScanDepth
    const size_t kSecretBytes
    const size_t kProofBytes
    const size_t kSessionBytes
    cdef cppclass ScanLimits:
        uint32_t depth
        uint32_t elements
        uint32_t text_bytes
        uint32_t binary_bytes
    cdef cppclass MessageHead:
        const uint8_t* op
        uint32_t op_bytes
        const uint8_t* session
        uint64_t seq
        ScanFault fault
    MessageHead scan_message(const uint8_t* message, size_t size, const ScanLimits& limits)


FAULTS = ("", "too deep", "too many values", "too long a text", "too long a byte string", "broken")


cdef class Scan:
    cdef ScanLimits limits

    def __cinit__(self, *, uint32_t depth, uint32_t elements, uint32_t text_bytes, uint32_t binary_bytes):
        if depth > kMaxScanDepth:
            raise ValueError(f"depth: must be at most {kMaxScanDepth}, not {depth}")
        self.limits.depth = depth
        self.limits.elements = elements
        self.limits.text_bytes = text_bytes
        self.limits.binary_bytes = binary_bytes

    def __call__(self, frame):
        cdef Py_buffer view
        cdef MessageHead head
        cdef const uint8_t* at
        cdef size_t start = 0
        PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
        try:
            at = <const uint8_t*>view.buf
            proof = b""
            if <size_t>view.len >= kProofBytes and at[0] == 0xC4 and at[1] == kSecretBytes:
                start = kProofBytes
                proof = PyBytes_FromStringAndSize(<const char*>at + 2, kSecretBytes)
            head = scan_message(at + start, <size_t>view.len - start, self.limits)
            op = b"" if head.op == NULL else PyBytes_FromStringAndSize(<const char*>head.op, head.op_bytes)
            session = b"" if head.session == NULL else PyBytes_FromStringAndSize(
                <const char*>head.session, kSessionBytes)
            return proof, op, session, head.seq, <str>PyTuple_GET_ITEM(FAULTS, <int>head.fault)
        finally:
            PyBuffer_Release(&view)
