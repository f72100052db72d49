// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4) for chained chunk keys: hundreds of short, dependent hashes per request, so
// the overhead of each call matters (docs/decisions/01-hashing.md).
//
//   c_i = SHA-256(c_{i-1} | tokens of chunk i, u32 little-endian | extra_i), c_{-1} = root
//   storage key = SHA-256(c_i | SHA-256(root | slice digest))
//
// Thread-safe, as hash/crc32c.h is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstrata/digest.h"

namespace kvstrata {

// The name of the implementation in use: scalar, armsha2 or shani.
const char* sha256_path() noexcept;

// The digest of `n` bytes.
Digest sha256(const void* data, std::size_t n) noexcept;

// Bytes that are hashed after the tokens of one chunk.
struct ChunkExtra {
  std::uint64_t chunk;  // index of the chunk in the call
  Digest bytes;
};

// Writes c_0 ... c_{n-1} of the n = tokens.size() / chunk_tokens full chunks to `out`, with `start`
// as c_{-1}. Tokens of an incomplete last chunk are ignored. REQUIRES: chunk_tokens > 0; `extras`
// is sorted by chunk and has at most one entry per chunk; `out` has room for n digests.
void chain_keys(const Digest& start, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<const ChunkExtra> extras, Digest* out) noexcept;

// Writes the storage key of every chunk and slice to `out`, all slices of a chunk together. `root`
// is that of the identity: no chain key, whatever its bytes, leads to a storage key of another
// identity. REQUIRES: `out` has room for chain.size() * slices.size() keys.
void storage_keys(const Digest& root, std::span<const Digest> chain, std::span<const Digest> slices,
                  Digest* out) noexcept;

// The same in two steps, for keys that are derived piece by piece: first SHA-256(root | slice
// digest) of each slice, then, from these, the storage keys of some chunks.
void bind_slices(const Digest& root, std::span<const Digest> slices, Digest* out) noexcept;
void bound_keys(std::span<const Digest> chain, std::span<const Digest> bound, Digest* out) noexcept;

}  // namespace kvstrata
