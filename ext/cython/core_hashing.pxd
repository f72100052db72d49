# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/src/hash/sha256.h, as far as hashing.pyx uses it."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t

from core_copying cimport Digest


cdef extern from "hash/sha256.h" namespace "kvstrata" nogil:
    const char* sha256_path()
    cdef cppclass ChunkExtra:
        uint64_t chunk
        Digest bytes
    cdef cppclass TokenSpan "std::span<const std::uint32_t>":
        TokenSpan(const uint32_t* data, size_t n)
    cdef cppclass ExtraSpan "std::span<const kvstrata::ChunkExtra>":
        ExtraSpan(const ChunkExtra* data, size_t n)
    cdef cppclass DigestSpan "std::span<const kvstrata::Digest>":
        DigestSpan(const Digest* start, size_t n)
        const Digest* data() noexcept
        size_t size() noexcept
    void c_chain_keys "kvstrata::chain_keys"(
        const Digest& start, TokenSpan tokens, size_t chunk_tokens, ExtraSpan extras, Digest* out)
    void c_storage_keys "kvstrata::storage_keys"(
        const Digest& root, DigestSpan chain, DigestSpan slices, Digest* out
    )
