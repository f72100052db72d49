# Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
"""ext/core/src/hash/sha256.h, as far as hashing.pyx uses it."""

from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from core_copying cimport Digest
from core_status cimport Status


cdef extern from "hash/sha256.h" namespace "kvstrata" nogil:
    enum class Sha256Path(unsigned char):
        pass
    const int kSha256PathCount
    const char* sha256_path_name(Sha256Path path)
    cbool sha256_path_supported(Sha256Path path)
    Sha256Path sha256_path()
    Status sha256_set_path(Sha256Path path)
    void sha256_reset_path()
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
