// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static_assert(std::endian::native == std::endian::little,
              "chain_keys hashes the bytes of tokens in memory as u32 little-endian");

namespace kvstrata {
namespace {

using State = std::array<std::uint32_t, 8>;
constexpr std::size_t kBlock = 64;
// Hashes `blocks` blocks of 64 bytes into the state.
using Compress = void (*)(State& state, const unsigned char* data, std::size_t blocks) noexcept;

struct Implementation {
  const char* name;
  Compress compress;
};

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
alignas(64) constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// The block after a message of exactly one block.
constexpr std::array<unsigned char, kBlock> kPadding = [] {
  std::array<unsigned char, kBlock> padding{};
  padding[0] = 0x80;
  padding[kBlock - 2] = (kBlock * 8) >> 8;
  return padding;
}();

// Word i of a message's schedule, from the words 16, 15, 7 and 2 before it.
constexpr std::uint32_t next_word(std::uint32_t before_16, std::uint32_t before_15,
                                  std::uint32_t before_7, std::uint32_t before_2) noexcept {
  return before_16 + (std::rotr(before_15, 7) ^ std::rotr(before_15, 18) ^ (before_15 >> 3)) +
         before_7 + (std::rotr(before_2, 17) ^ std::rotr(before_2, 19) ^ (before_2 >> 10));
}

void compress_scalar(State& state, const unsigned char* data, std::size_t blocks) noexcept {
  for (; blocks > 0; --blocks, data += kBlock) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) {
      std::uint32_t word;
      std::memcpy(&word, data + 4 * i, 4);
      w[i] = __builtin_bswap32(word);
    }
    for (std::size_t i = 16; i < 64; ++i) {
      w[i] = next_word(w[i - 16], w[i - 15], w[i - 7], w[i - 2]);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                               ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const std::uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + t2;
    }
    const State step = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) {
      state[i] += step[i];
    }
  }
}

#if defined(__x86_64__)

// The instructions keep the state as (a b e f) and (c d g h), highest word first, and do two rounds
// at a time with the two lowest words of message + constants.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(State& state,
                                                                 const unsigned char* data,
                                                                 std::size_t blocks) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i dcba = _mm_shuffle_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data())), 0xb1);  // c d a b
  const __m128i hgfe = _mm_shuffle_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(state.data() + 4)), 0x1b);  // e f g h
  __m128i abef = _mm_alignr_epi8(dcba, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, dcba, 0xf0);
  for (; blocks > 0; --blocks, data += kBlock) {
    const __m128i abef_before = abef;
    const __m128i cdgh_before = cdgh;
    // w[i % 4] holds message words 4i .. 4i+3; only the last four groups are kept.
    __m128i w[4];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m128i& now = w[i % 4];
      if (i < 4) {
        now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i),
                               big_endian);
      } else {
        const __m128i& w1 = w[(i + 1) % 4];  // 12 words ago
        const __m128i& w2 = w[(i + 2) % 4];  // 8 words ago
        const __m128i& w3 = w[(i + 3) % 4];  // 4 words ago
        now = _mm_sha256msg2_epu32(
            _mm_add_epi32(_mm_sha256msg1_epu32(now, w1), _mm_alignr_epi8(w3, w2, 4)), w3);
      }
      const __m128i sum =
          _mm_add_epi32(now, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound.data()) + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);  // a b e f, lowest word first
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);  // g h c d
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data()), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state.data() + 4), _mm_alignr_epi8(dchg, feba, 8));
}

#elif defined(__aarch64__)

#if defined(__clang__)
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
void compress_arm(State& state, const unsigned char* data, std::size_t blocks) noexcept {
  uint32x4_t abcd = vld1q_u32(state.data());
  uint32x4_t efgh = vld1q_u32(state.data() + 4);
  for (; blocks > 0; --blocks, data += kBlock) {
    const uint32x4_t abcd_before = abcd;
    const uint32x4_t efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i) {
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      uint32x4_t& now = w[i % 4];
      if (i >= 4) {
        now = vsha256su1q_u32(vsha256su0q_u32(now, w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      }
      const uint32x4_t sum = vaddq_u32(now, vld1q_u32(kRound.data() + 4 * i));
      const uint32x4_t abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_now, sum);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state.data(), abcd);
  vst1q_u32(state.data() + 4, efgh);
}

#endif

// --------------------------------------------------------------------------------------- dispatch

const Implementation& best() noexcept {
  static const Implementation implementation = []() -> Implementation {
    [[maybe_unused]] const CpuFeatures& cpu = cpu_features();
#if defined(__aarch64__)
    if (cpu.arm_sha2) return {"armsha2", compress_arm};
#elif defined(__x86_64__)
    if (cpu.sha_ni && cpu.sse42) return {"shani", compress_sha_ni};
#endif
    return {"scalar", compress_scalar};
  }();
  return implementation;
}

// ------------------------------------------------------------------------------------ one message

Digest digest_of(const State& state) noexcept {
  Digest out;
  for (std::size_t i = 0; i < state.size(); ++i) {
    const std::uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(out.data() + 4 * i, &word, 4);
  }
  return out;
}

class Hasher {
 public:
  explicit Hasher(Compress compress) noexcept : compress_(compress) {}

  void update(const void* data, std::size_t n) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(data);
    total_ += n;
    if (held_ > 0) {
      const std::size_t take = std::min(n, kBlock - held_);
      std::memcpy(buffer_.data() + held_, bytes, take);
      held_ += take;
      bytes += take;
      n -= take;
      if (held_ < kBlock) {
        return;
      }
      compress_(state_, buffer_.data(), 1);
      held_ = 0;
    }
    const std::size_t blocks = n / kBlock;
    if (blocks > 0) {
      compress_(state_, bytes, blocks);
      bytes += blocks * kBlock;
      n -= blocks * kBlock;
    }
    if (n > 0) {
      std::memcpy(buffer_.data(), bytes, n);
      held_ = n;
    }
  }

  // Ends the message and returns its digest. The hasher cannot be used afterwards.
  Digest finish() noexcept {
    const std::uint64_t bits = __builtin_bswap64(total_ * 8);
    buffer_[held_++] = 0x80;
    if (held_ > kBlock - sizeof bits) {
      std::memset(buffer_.data() + held_, 0, kBlock - held_);
      compress_(state_, buffer_.data(), 1);
      held_ = 0;
    }
    std::memset(buffer_.data() + held_, 0, kBlock - sizeof bits - held_);
    std::memcpy(buffer_.data() + kBlock - sizeof bits, &bits, sizeof bits);
    compress_(state_, buffer_.data(), 1);
    return digest_of(state_);
  }

 private:
  Compress compress_;
  State state_ = kInitial;
  std::array<unsigned char, kBlock> buffer_;
  std::size_t held_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace

const char* sha256_path() noexcept {
  return best().name;
}

Digest sha256(const void* data, std::size_t n) noexcept {
  Hasher hasher(best().compress);
  hasher.update(data, n);
  return hasher.finish();
}

void chain_keys(const Digest& start, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<const ChunkExtra> extras,
                Digest* out) noexcept {
  const Compress compress = best().compress;
  const std::size_t chunks = tokens.size() / chunk_tokens;
  const Digest* previous = &start;
  std::size_t next_extra = 0;
  for (std::size_t i = 0; i < chunks; ++i) {
    Hasher hasher(compress);
    hasher.update(previous->data(), previous->size());
    hasher.update(tokens.data() + i * chunk_tokens, chunk_tokens * sizeof(std::uint32_t));
    if (next_extra < extras.size() && extras[next_extra].chunk == i) {
      hasher.update(extras[next_extra].bytes.data(), extras[next_extra].bytes.size());
      ++next_extra;
    }
    out[i] = hasher.finish();
    previous = &out[i];
  }
}

namespace {

// Writes SHA-256(first | second) of every pair to out[f * stride + s].
void hash_pairs(std::span<const Digest> firsts, std::span<const Digest> seconds, std::size_t stride,
                Digest* out) noexcept {
  const Compress compress = best().compress;
  // A message (two digests) fills one block.
  std::array<unsigned char, 2 * kBlock> message;
  std::memcpy(message.data() + kBlock, kPadding.data(), kBlock);
  for (std::size_t f = 0; f < firsts.size(); ++f) {
    std::memcpy(message.data(), firsts[f].data(), firsts[f].size());
    for (std::size_t s = 0; s < seconds.size(); ++s) {
      std::memcpy(message.data() + firsts[f].size(), seconds[s].data(), seconds[s].size());
      State state = kInitial;
      compress(state, message.data(), 2);
      out[f * stride + s] = digest_of(state);
    }
  }
}

}  // namespace

void storage_keys(const Digest& root, std::span<const Digest> chain, std::span<const Digest> slices,
                  Digest* out) noexcept {
  constexpr std::size_t kGroup = 16;  // slices at a time, so that nothing is allocated
  std::array<Digest, kGroup> bound;
  for (std::size_t begin = 0; begin < slices.size(); begin += kGroup) {
    const std::size_t n = std::min(kGroup, slices.size() - begin);
    hash_pairs(std::span(&root, 1), slices.subspan(begin, n), n, bound.data());
    hash_pairs(chain, std::span(bound.data(), n), slices.size(), out + begin);
  }
}

void bind_slices(const Digest& root, std::span<const Digest> slices, Digest* out) noexcept {
  hash_pairs(std::span(&root, 1), slices, slices.size(), out);
}

void bound_keys(std::span<const Digest> chain, std::span<const Digest> bound,
                Digest* out) noexcept {
  hash_pairs(chain, bound, bound.size(), out);
}

}  // namespace kvstrata
