// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4) for chained chunk keys: hundreds of short, dependent hashes a request, where
// the cost of a call counts (docs/decisions/0001-sha256-in-core.md).
//
//   c_i = SHA-256(c_{i-1} | tokens of chunk i, u32 little-endian | extra_i), c_{-1} = root
//   storage key = SHA-256(c_i | slice digest)
//
// Thread safety: as crc32c.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvstrata/record.h"
#include "kvstrata/status.h"

namespace kvstrata {

enum class Sha256Path : std::uint8_t {
  kScalar = 0,  // every CPU
  kArmSha2 = 1,
  kShaNi = 2,
};
inline constexpr int kSha256PathCount = 3;

const char* sha256_path_name(Sha256Path path) noexcept;
bool sha256_path_supported(Sha256Path path) noexcept;
Sha256Path sha256_path() noexcept;
// kUnsupported when this CPU cannot run `path`; then nothing changes.
Status sha256_set_path(Sha256Path path) noexcept;
void sha256_reset_path() noexcept;

Digest sha256(const void* data, std::size_t n) noexcept;

// Bytes that are hashed behind the tokens of one chunk.
struct ChunkExtra {
  std::uint64_t chunk;  // index in this call
  Digest bytes;
};

// Writes c_0 ... c_{n-1} of the n = tokens / chunk_tokens full chunks to `out`; what is left over
// is ignored. `extras` are sorted by chunk, each chunk at most once. REQUIRES: chunk_tokens > 0;
// room for n digests.
void chain_keys(const Digest& start, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<const ChunkExtra> extras, Digest* out) noexcept;

// Writes chain.size() * slices.size() keys, all slices of a chunk together. REQUIRES: room for
// them.
void storage_keys(std::span<const Digest> chain, std::span<const Digest> slices,
                  Digest* out) noexcept;

}  // namespace kvstrata
