// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "hash/sha256.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "base/cpu.h"
#include "base/dispatch.h"

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
// Hashes a message of exactly one block, and its padding, into each of two states.
using HashPair = void (*)(State& first, const unsigned char* first_data, State& second,
                          const unsigned char* second_data) noexcept;

struct Implementation {
  Compress compress;
  HashPair hash_pair;
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

// kRound plus the schedule of kPadding, which is the same for all such messages.
alignas(64) constexpr std::array<std::uint32_t, 64> kPaddingRound = [] {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t i = 0; i < kBlock; ++i) {
    w[i / 4] |= std::uint32_t{kPadding[i]} << (24 - 8 * (i % 4));
  }
  for (std::size_t i = 16; i < 64; ++i) {
    w[i] = next_word(w[i - 16], w[i - 15], w[i - 7], w[i - 2]);
  }
  for (std::size_t i = 0; i < 64; ++i) {
    w[i] += kRound[i];
  }
  return w;
}();

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
// at a time with the two lowest words of message + constants. Each instruction waits for the result
// of the previous one, so hashing kStreams independent messages at a time takes hardly longer than
// hashing one. With kPadded, each message is one block, and its padding is hashed too.
template <int kStreams, bool kPadded>
__attribute__((target("sha,sse4.1,ssse3"), always_inline)) inline void rounds_sha_ni(
    State* const* states, const unsigned char* const* data, std::size_t blocks) noexcept {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i abef[kStreams];
  __m128i cdgh[kStreams];
  for (int s = 0; s < kStreams; ++s) {
    const __m128i dcba = _mm_shuffle_epi32(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[s]->data())), 0xb1);  // c d a b
    const __m128i hgfe =
        _mm_shuffle_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(states[s]->data() + 4)),
                          0x1b);  // e f g h
    abef[s] = _mm_alignr_epi8(dcba, hgfe, 8);
    cdgh[s] = _mm_blend_epi16(hgfe, dcba, 0xf0);
  }
  for (std::size_t block = 0; block < blocks; ++block) {
    __m128i abef_before[kStreams];
    __m128i cdgh_before[kStreams];
    // w[i % 4] holds message words 4i .. 4i+3; only the last four groups are kept.
    __m128i w[kStreams][4];
    for (int s = 0; s < kStreams; ++s) {
      abef_before[s] = abef[s];
      cdgh_before[s] = cdgh[s];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i constants = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound.data()) + i);
#pragma GCC unroll 2
      for (int s = 0; s < kStreams; ++s) {
        __m128i& now = w[s][i % 4];
        if (i < 4) {
          const unsigned char* const bytes = data[s] + block * kBlock;
          now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + i),
                                 big_endian);
        } else {
          const __m128i& w1 = w[s][(i + 1) % 4];  // 12 words ago
          const __m128i& w2 = w[s][(i + 2) % 4];  // 8 words ago
          const __m128i& w3 = w[s][(i + 3) % 4];  // 4 words ago
          now = _mm_sha256msg2_epu32(
              _mm_add_epi32(_mm_sha256msg1_epu32(now, w1), _mm_alignr_epi8(w3, w2, 4)), w3);
        }
        const __m128i sum = _mm_add_epi32(now, constants);
        cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], sum);
        abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], _mm_shuffle_epi32(sum, 0x0e));
      }
    }
    for (int s = 0; s < kStreams; ++s) {
      abef[s] = _mm_add_epi32(abef[s], abef_before[s]);
      cdgh[s] = _mm_add_epi32(cdgh[s], cdgh_before[s]);
    }
  }
  if constexpr (kPadded) {
    __m128i abef_before[kStreams];
    __m128i cdgh_before[kStreams];
    for (int s = 0; s < kStreams; ++s) {
      abef_before[s] = abef[s];
      cdgh_before[s] = cdgh[s];
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i sum =
          _mm_load_si128(reinterpret_cast<const __m128i*>(kPaddingRound.data()) + i);
      const __m128i next = _mm_shuffle_epi32(sum, 0x0e);
#pragma GCC unroll 2
      for (int s = 0; s < kStreams; ++s) {
        cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], sum);
        abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], next);
      }
    }
    for (int s = 0; s < kStreams; ++s) {
      abef[s] = _mm_add_epi32(abef[s], abef_before[s]);
      cdgh[s] = _mm_add_epi32(cdgh[s], cdgh_before[s]);
    }
  }
  for (int s = 0; s < kStreams; ++s) {
    const __m128i feba = _mm_shuffle_epi32(abef[s], 0x1b);  // a b e f, lowest word first
    const __m128i dchg = _mm_shuffle_epi32(cdgh[s], 0xb1);  // g h c d
    _mm_storeu_si128(reinterpret_cast<__m128i*>(states[s]->data()),
                     _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(states[s]->data() + 4),
                     _mm_alignr_epi8(dchg, feba, 8));
  }
}

__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(State& state,
                                                                 const unsigned char* data,
                                                                 std::size_t blocks) noexcept {
  State* const states[] = {&state};
  rounds_sha_ni<1, false>(states, &data, blocks);
}

__attribute__((target("sha,sse4.1,ssse3"))) void hash_pair_sha_ni(
    State& first, const unsigned char* first_data, State& second,
    const unsigned char* second_data) noexcept {
  State* const states[] = {&first, &second};
  const unsigned char* const data[] = {first_data, second_data};
  rounds_sha_ni<2, true>(states, data, 1);
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

template <Compress kCompress>
void hash_one_by_one(State& first, const unsigned char* first_data, State& second,
                     const unsigned char* second_data) noexcept {
  kCompress(first, first_data, 1);
  kCompress(first, kPadding.data(), 1);
  kCompress(second, second_data, 1);
  kCompress(second, kPadding.data(), 1);
}

constexpr Implementation kScalar = {compress_scalar, hash_one_by_one<compress_scalar>};
#if defined(__aarch64__)
constexpr Implementation kArmSha2 = {compress_arm, hash_one_by_one<compress_arm>};
#elif defined(__x86_64__)
constexpr Implementation kShaNi = {compress_sha_ni, hash_pair_sha_ni};
#endif

const Implementation* implementation_of(Sha256Path path) noexcept {
  [[maybe_unused]] const CpuFeatures& cpu = cpu_features();
  switch (path) {
    case Sha256Path::kScalar:
      return &kScalar;
#if defined(__aarch64__)
    case Sha256Path::kArmSha2:
      return cpu.arm_sha2 ? &kArmSha2 : nullptr;
#endif
#if defined(__x86_64__)
    case Sha256Path::kShaNi:
      return cpu.sha_ni && cpu.sse42 ? &kShaNi : nullptr;
#endif
    default:
      return nullptr;
  }
}

using Paths = Dispatch<Sha256Path, kSha256PathCount, implementation_of>;

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

const char* sha256_path_name(Sha256Path path) noexcept {
  switch (path) {
    case Sha256Path::kScalar:
      return "scalar";
    case Sha256Path::kArmSha2:
      return "armsha2";
    case Sha256Path::kShaNi:
      return "shani";
  }
  return "unknown";
}

bool sha256_path_supported(Sha256Path path) noexcept {
  return Paths::supported(path);
}

Sha256Path sha256_path() noexcept {
  return Paths::path();
}

Status sha256_set_path(Sha256Path path) noexcept {
  return Paths::set(path, "path: this CPU does not support that SHA-256 path");
}

void sha256_reset_path() noexcept {
  Paths::reset();
}

Digest sha256(const void* data, std::size_t n) noexcept {
  Hasher hasher(Paths::implementation()->compress);
  hasher.update(data, n);
  return hasher.finish();
}

void chain_keys(const Digest& start, std::span<const std::uint32_t> tokens,
                std::size_t chunk_tokens, std::span<const ChunkExtra> extras,
                Digest* out) noexcept {
  const Compress compress = Paths::implementation()->compress;
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
  const HashPair hash_pair = Paths::implementation()->hash_pair;
  // A message (two digests) fills one block. The last message of an odd number is hashed twice.
  std::array<unsigned char, kBlock> messages[2];
  Digest* places[2];
  const std::size_t n = firsts.size() * seconds.size();
  for (std::size_t i = 0; i < n; i += 2) {
    for (std::size_t k = 0; k < 2; ++k) {
      const std::size_t message = std::min(i + k, n - 1);
      const std::size_t f = message / seconds.size();
      const std::size_t s = message % seconds.size();
      std::memcpy(messages[k].data(), firsts[f].data(), firsts[f].size());
      std::memcpy(messages[k].data() + firsts[f].size(), seconds[s].data(), seconds[s].size());
      places[k] = out + f * stride + s;
    }
    State first = kInitial;
    State second = kInitial;
    hash_pair(first, messages[0].data(), second, messages[1].data());
    *places[0] = digest_of(first);
    if (i + 1 < n) *places[1] = digest_of(second);
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
