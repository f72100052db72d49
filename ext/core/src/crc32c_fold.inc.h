// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The folding kernel, included by crc32c.cpp once per vector width. (A template cannot do it: the
// target attribute of a function is not allowed to depend on a template parameter.) The including
// file defines:
//   FOLD_NAMESPACE    namespace that receives rows()
//   FOLD_TARGET       the target attribute
//   FOLD_WIDTH        bytes of a vector: 16, 32 or 64
//   V                 the vector type, and load(p), store(p, v), stream(p, v), set_crc(c) (c in the
//                     lowest 32 bits, rest 0), fold_constants(hi, lo) (in every 128-bit lane),
//                     fold(acc, constants, data), as always-inline functions of that namespace
//
// How it works. A CRC is the remainder of the message, read as a polynomial over GF(2). Moving a
// 128-bit lane D bits forward in the message multiplies it by x^D; the product of each half with the
// remainder of x^(D +- 32) is congruent to that and again 128 bits wide, so it can be XORed onto the
// lane D bits further on. Four vectors are carried side by side to hide the multiplier's latency; at
// the end they are folded onto one, whose bytes stand for the whole message so far and go through
// the crc32 instruction. The initial value is XORed onto the first four bytes.

namespace FOLD_NAMESPACE {

inline constexpr std::size_t kStep = 4 * FOLD_WIDTH;

template <bool kCopy, bool kStreamStores>
FOLD_TARGET inline void put(char* dst, V v) noexcept {
  if constexpr (kCopy) {
    if constexpr (kStreamStores) {
      stream(dst, v);
    } else {
      store(dst, v);
    }
  }
}

// Raw CRC state (not inverted) over `rows` rows. REQUIRES: run_bytes is a positive multiple of
// FOLD_WIDTH; of kStep when rows > 1; run_bytes >= kStep; every dst row is aligned to FOLD_WIDTH if
// kStreamStores.
template <bool kCopy, bool kStreamStores>
FOLD_TARGET std::uint32_t fold_rows(const CopyRows& rect, std::uint32_t state) noexcept {
  const V far = fold_constants(fold_constant(kStep * 8 - 32), fold_constant(kStep * 8 + 32));
  const V near = fold_constants(fold_constant(FOLD_WIDTH * 8 - 32), fold_constant(FOLD_WIDTH * 8 + 32));
  const char* src = static_cast<const char*>(rect.src);
  char* dst = static_cast<char*>(rect.dst);
  const std::uintptr_t ahead = prefetch_distance(rect);

  V a0 = load(src);
  V a1 = load(src + FOLD_WIDTH);
  V a2 = load(src + 2 * FOLD_WIDTH);
  V a3 = load(src + 3 * FOLD_WIDTH);
  put<kCopy, kStreamStores>(dst, a0);
  put<kCopy, kStreamStores>(dst + FOLD_WIDTH, a1);
  put<kCopy, kStreamStores>(dst + 2 * FOLD_WIDTH, a2);
  put<kCopy, kStreamStores>(dst + 3 * FOLD_WIDTH, a3);
  a0 = exclusive_or(a0, set_crc(state));

  const std::size_t whole = rect.run_bytes / kStep * kStep;
  std::size_t at = kStep;
  for (std::size_t row = 0;;) {
    for (; at < whole; at += kStep) {
      prefetch_step<kStep>(reinterpret_cast<std::uintptr_t>(src + at) + ahead);
      const V d0 = load(src + at);
      const V d1 = load(src + at + FOLD_WIDTH);
      const V d2 = load(src + at + 2 * FOLD_WIDTH);
      const V d3 = load(src + at + 3 * FOLD_WIDTH);
      put<kCopy, kStreamStores>(dst + at, d0);
      put<kCopy, kStreamStores>(dst + at + FOLD_WIDTH, d1);
      put<kCopy, kStreamStores>(dst + at + 2 * FOLD_WIDTH, d2);
      put<kCopy, kStreamStores>(dst + at + 3 * FOLD_WIDTH, d3);
      a0 = fold(a0, far, d0);
      a1 = fold(a1, far, d1);
      a2 = fold(a2, far, d2);
      a3 = fold(a3, far, d3);
    }
    if (++row == rect.rows) {
      break;
    }
    src += rect.src_stride_bytes;
    dst += rect.dst_stride_bytes;
    at = 0;
  }

  a1 = fold(a0, near, a1);
  a2 = fold(a1, near, a2);
  a3 = fold(a2, near, a3);
  for (; at < rect.run_bytes; at += FOLD_WIDTH) {  // only ever with a single row
    const V d = load(src + at);
    put<kCopy, kStreamStores>(dst + at, d);
    a3 = fold(a3, near, d);
  }
  alignas(64) char rest[FOLD_WIDTH];
  store(rest, a3);
  return crc_words(rest, FOLD_WIDTH, 0);
}

// One contiguous run of any length and alignment.
template <bool kCopy, bool kStreamStores>
FOLD_TARGET std::uint32_t fold_run(char* dst, const char* src, std::size_t n,
                                   std::uint32_t state) noexcept {
  if (n < 2 * kStep) {
    return small_run<kCopy>(dst, src, n, state);
  }
  if constexpr (kCopy) {
    const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(dst)) & (FOLD_WIDTH - 1);
    state = small_run<true>(dst, src, head, state);
    dst += head;
    src += head;
    n -= head;
  }
  const std::size_t body = n & ~static_cast<std::size_t>(FOLD_WIDTH - 1);
  state = fold_rows<kCopy, kStreamStores>(CopyRows{dst, src, 0, 0, body, 1}, state);
  return small_run<kCopy>(kCopy ? dst + body : nullptr, src + body, n - body, state);
}

template <bool kStreamStores>
FOLD_TARGET std::uint32_t fold_rect(const CopyRows& rect, std::uint32_t state) noexcept {
  const bool aligned = !kStreamStores ||
                       ((reinterpret_cast<std::uintptr_t>(rect.dst) |
                         static_cast<std::uintptr_t>(rect.dst_stride_bytes)) &
                        (FOLD_WIDTH - 1)) == 0;
  if (rect.rows > 1 && rect.run_bytes % kStep == 0 && aligned) {
    return fold_rows<true, kStreamStores>(rect, state);
  }
  const char* src = static_cast<const char*>(rect.src);
  char* dst = static_cast<char*>(rect.dst);
  for (std::size_t row = 0; row < rect.rows; ++row) {
    state = fold_run<true, kStreamStores>(dst, src, rect.run_bytes, state);
    src += rect.src_stride_bytes;
    dst += rect.dst_stride_bytes;
  }
  return state;
}

FOLD_TARGET std::uint32_t checksum(const char* src, std::size_t n, std::uint32_t state) noexcept {
  return fold_run<false, false>(nullptr, src, n, state);
}
FOLD_TARGET std::uint32_t copy_stream(const CopyRows& rect, std::uint32_t state) noexcept {
  return fold_rect<true>(rect, state);
}
FOLD_TARGET std::uint32_t copy_cached(const CopyRows& rect, std::uint32_t state) noexcept {
  return fold_rect<false>(rect, state);
}
constexpr Kernel kKernel = {checksum, copy_stream, copy_cached};

}  // namespace FOLD_NAMESPACE
