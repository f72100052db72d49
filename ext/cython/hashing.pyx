# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""Chunk keys in batches (ext/core/include/kvstrata/sha256.h); see hashing.pyi for the contract."""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t
from libcpp.vector cimport vector


cdef extern from *:
    """
    // A token id, or -1 for anything that is none. Small ints take the short way; never sets an error.
    static inline long long kvstrata_as_token(PyObject* number) {
      if (!PyLong_Check(number)) return -1;
    #if PY_VERSION_HEX >= 0x030C0000
      if (PyUnstable_Long_IsCompact((PyLongObject*)number)) {
        return PyUnstable_Long_CompactValue((PyLongObject*)number);
      }
    #else
      if (Py_SIZE(number) == 1) return ((PyLongObject*)number)->ob_digit[0];
    #endif
      int overflow = 0;
      long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
      return overflow || value > 0xFFFFFFFFLL ? -1 : value;
    }
    """
    ctypedef struct PyObject:
        pass
    long long as_token "kvstrata_as_token"(PyObject*) noexcept nogil


cdef extern from "Python.h":
    PyObject* PyList_GET_ITEM(object, Py_ssize_t) noexcept


cdef extern from *:
    """
    #include <cstring>
    #include <span>
    #include "kvstrata/sha256.h"
    namespace kvstrata_hashing {
    using kvstrata::ChunkExtra;
    using kvstrata::Digest;
    inline void chain(const Digest& start, const std::uint32_t* tokens, std::size_t count, std::size_t chunk_tokens,
                      const std::vector<ChunkExtra>& extras, void* out) noexcept {
      kvstrata::chain_keys(start, std::span<const std::uint32_t>(tokens, count), chunk_tokens,
                           std::span<const ChunkExtra>(extras), static_cast<Digest*>(out));
    }
    inline void storage(const void* chain, std::size_t n, const void* slices, std::size_t m, void* out) noexcept {
      kvstrata::storage_keys(std::span<const Digest>(static_cast<const Digest*>(chain), n),
                             std::span<const Digest>(static_cast<const Digest*>(slices), m),
                             static_cast<Digest*>(out));
    }
    static_assert(sizeof(Digest) == 32 && alignof(Digest) == 1);
    inline void add_extra(std::vector<ChunkExtra>& extras, std::uint64_t chunk, const char* bytes) {
      ChunkExtra extra;
      extra.chunk = chunk;
      std::memcpy(&extra.bytes, bytes, 32);
      extras.push_back(extra);
    }
    inline Digest digest(const char* bytes) noexcept {
      Digest made;
      std::memcpy(&made, bytes, 32);
      return made;
    }
    }
    """
    cdef cppclass Digest "kvstrata::Digest":
        pass
    cdef cppclass ChunkExtra "kvstrata::ChunkExtra":
        pass
    void chain "kvstrata_hashing::chain"(const Digest&, const uint32_t*, size_t, size_t, const vector[ChunkExtra]&,
                                         void*) noexcept nogil
    void storage "kvstrata_hashing::storage"(const void*, size_t, const void*, size_t, void*) noexcept nogil
    void add_extra "kvstrata_hashing::add_extra"(vector[ChunkExtra]&, uint64_t, const char*) except +
    Digest digest "kvstrata_hashing::digest"(const char*) noexcept


cdef extern from "kvstrata/sha256.h" namespace "kvstrata" nogil:
    cdef enum class Sha256Path(unsigned char):
        pass
    Sha256Path c_sha256_path "kvstrata::sha256_path"() noexcept
    const char* c_sha256_path_name "kvstrata::sha256_path_name"(Sha256Path) noexcept



def chain_keys(bytes start, tokens, Py_ssize_t chunk_tokens, extras=None, Py_ssize_t first=0):
    """See hashing.pyi."""
    if len(start) != 32:
        raise ValueError(f"start: a chain key has 32 bytes, found {len(start)}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens: must be at least 1, found {chunk_tokens}")
    if first < 0:
        raise ValueError(f"first: must not be negative, found {first}")
    if isinstance(tokens, list):
        return _chain_of_list(start, <list>tokens, chunk_tokens, extras, first)
    return _chain_of_buffer(start, tokens, chunk_tokens, extras, first)


cdef bytes _chain_of_list(bytes start, list tokens, Py_ssize_t chunk_tokens, extras, Py_ssize_t first):
    cdef Py_ssize_t count = PyList_GET_SIZE(tokens) - first
    cdef Py_ssize_t chunks = count // chunk_tokens if count > 0 else 0
    cdef Py_ssize_t used = chunks * chunk_tokens
    cdef vector[uint32_t] numbers
    cdef Py_ssize_t i
    cdef long long value
    cdef uint32_t* into
    if not chunks:
        return b""
    numbers.resize(used)
    into = numbers.data()
    for i in range(used):
        value = as_token(PyList_GET_ITEM(tokens, first + i))
        if value < 0:
            raise ValueError(f"tokens[{first + i}]: not a token id (0 … 2**32 - 1): {tokens[first + i]!r:.40}")
        into[i] = <uint32_t>value
    return _chain(start, into, chunks, chunk_tokens, extras)


cdef bytes _chain_of_buffer(bytes start, tokens, Py_ssize_t chunk_tokens, extras, Py_ssize_t first):
    cdef Py_buffer view
    cdef Py_ssize_t count, chunks
    PyObject_GetBuffer(tokens, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    try:
        kind = (<bytes>view.format).decode() if view.format != NULL else "B"
        if view.itemsize == 1 and view.len % 4 == 0:
            count = view.len // 4
        elif view.itemsize == 4 and kind.lstrip("=<@") in ("I", "L"):
            count = view.len // 4
        else:
            raise ValueError(f"tokens: must hold u32 (or bytes of them), found {view.len} bytes of format {kind!r}")
        count -= first
        chunks = count // chunk_tokens if count > 0 else 0
        if not chunks:
            return b""
        return _chain(start, (<const uint32_t*>view.buf) + first, chunks, chunk_tokens, extras)
    finally:
        PyBuffer_Release(&view)


cdef bytes _chain(bytes start, const uint32_t* tokens, Py_ssize_t chunks, Py_ssize_t chunk_tokens, extras):
    cdef vector[ChunkExtra] behind
    cdef bytes out = PyBytes_FromStringAndSize(NULL, chunks * 32)
    cdef void* into = PyBytes_AS_STRING(out)
    cdef Digest begin = digest(start)
    for chunk in sorted(extras or ()):
        extra = extras[chunk]
        if not isinstance(extra, bytes) or len(extra) != 32:
            raise ValueError(f"extras[{chunk}]: must be 32 bytes, found {extra!r:.80}")
        if not 0 <= chunk < chunks:
            raise ValueError(f"extras[{chunk}]: no such full chunk here, there are {chunks}")
        add_extra(behind, chunk, <bytes>extra)
    with nogil:
        chain(begin, tokens, chunks * chunk_tokens, chunk_tokens, behind, into)
    return out


def storage_keys(bytes chain_, bytes slice_digests):
    """See hashing.pyi."""
    cdef Py_ssize_t n = len(chain_) // 32
    cdef Py_ssize_t m = len(slice_digests) // 32
    cdef bytes out
    cdef const char* keys = PyBytes_AS_STRING(chain_)
    cdef const char* slices = PyBytes_AS_STRING(slice_digests)
    cdef void* into
    for name, given in (("chain", chain_), ("slice_digests", slice_digests)):
        if len(given) % 32:
            raise ValueError(f"{name}: length must be a multiple of 32, found {len(given)}")
    out = PyBytes_FromStringAndSize(NULL, n * m * 32)
    into = PyBytes_AS_STRING(out)
    if n * m:
        with nogil:
            storage(keys, n, slices, m, into)
    return out


def sha256_path():
    """See hashing.pyi."""
    return c_sha256_path_name(c_sha256_path()).decode()
