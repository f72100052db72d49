// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The folding kernel, included by crc32c.cpp once per vector width. (It cannot be a template: a
// function's target attribute must not depend on a template parameter.) The including file defines:
//   FOLD_NAMESPACE    the namespace that receives kKernel
//   FOLD_TARGET       the target attribute
//   FOLD_WIDTH        the bytes of a vector: 32 or 64
//   FOLD_NAME         the name of the implementation
// and, in that namespace, the vector type V and the always-inline functions load(p), store(p, v),
// stream(p, v), set_crc(c) (c in the lowest 32 bits, the others 0), exclusive_or(a, b),
// fold_constants(hi, lo) (the pair in every 128-bit lane) and fold(acc, constants, data).
//
// How it works. A CRC is the remainder of the message, read as a polynomial over GF(2). Moving a
// 128-bit lane forward by D bits multiplies it by x^D. The sum of the products of its halves with
// the remainders of x^(D +- 32) is congruent to that and fits 128 bits, so it can be XORed onto the
// lane D bits further on. Four vectors are folded side by side to hide the multiplier's latency. At
// the end they are folded into one vector, whose bytes have the same CRC as the whole message so
// far; the crc32 instruction computes it. The initial value is XORed onto the first four bytes.

namespace FOLD_NAMESPACE {

inline constexpr std::size_t kStep = 4 * FOLD_WIDTH;

template <bool kCopy>
FOLD_TARGET inline void put(char* dst, V v) noexcept {
  if constexpr (kCopy) {
    stream(dst, v);
  }
}

// The four accumulators of one message.
struct Lanes {
  V a0, a1, a2, a3;
};

// Folds bytes [from, to) of one run in steps of kStep, and prefetches `ahead` bytes further on.
template <bool kCopy, bool kLongRuns>
FOLD_TARGET KVSTRATA_INLINE void fold_steps(char* dst, const char* src, std::size_t from,
                                            std::size_t to, std::uintptr_t ahead, V far,
                                            Lanes& lanes) noexcept {
  for (std::size_t at = from; at < to; at += kStep) {
    prefetch_step<kLongRuns, kStep>(reinterpret_cast<std::uintptr_t>(src + at) + ahead);
    const V d0 = load(src + at);
    const V d1 = load(src + at + FOLD_WIDTH);
    const V d2 = load(src + at + 2 * FOLD_WIDTH);
    const V d3 = load(src + at + 3 * FOLD_WIDTH);
    put<kCopy>(dst + at, d0);
    put<kCopy>(dst + at + FOLD_WIDTH, d1);
    put<kCopy>(dst + at + 2 * FOLD_WIDTH, d2);
    put<kCopy>(dst + at + 3 * FOLD_WIDTH, d3);
    lanes.a0 = fold(lanes.a0, far, d0);
    lanes.a1 = fold(lanes.a1, far, d1);
    lanes.a2 = fold(lanes.a2, far, d2);
    lanes.a3 = fold(lanes.a3, far, d3);
  }
}

// The pages that are copied in turn. With half of their registers, they hold two accumulators each.
inline constexpr std::size_t kPages = FOLD_WIDTH / 8;
inline constexpr std::size_t kTurn = 2 * FOLD_WIDTH;

// Copies `groups` times kPages pages: a few lines of each page in turn, as an Intel core is fastest
// (its prefetchers follow a stream a page). Each page has accumulators of its own, which jump from
// a page to the one kPages further on. REQUIRES: groups is positive and the list has as many pages;
// run_bytes is a multiple of kPageBytes; every dst is aligned to FOLD_WIDTH.
FOLD_TARGET inline std::uint32_t copy_pages(const RunList& list, std::size_t groups,
                                            std::uint32_t state) noexcept {
  constexpr std::size_t kJump = (kPages - 1) * kPageBytes + kTurn;
  const V far = fold_constants(fold_constant(kTurn * 8 - 32), fold_constant(kTurn * 8 + 32));
  const V jump = fold_constants(fold_constant(kJump * 8 - 32), fold_constant(kJump * 8 + 32));
  const V page =
      fold_constants(fold_constant(kPageBytes * 8 - 32), fold_constant(kPageBytes * 8 + 32));
  const V near =
      fold_constants(fold_constant(FOLD_WIDTH * 8 - 32), fold_constant(FOLD_WIDTH * 8 + 32));
  const V zero = set_crc(0);
  V initial = set_crc(state);
  V even[kPages];
  V odd[kPages];
  CopyRun now[kPages];
  CopyRun next[kPages];
  for (std::size_t i = 0; i < kPages; ++i) {
    even[i] = odd[i] = zero;
    next[i] = page_of(list, i);
  }
  for (std::size_t group = 1; group <= groups; ++group) {
    for (std::size_t i = 0; i < kPages; ++i) {
      now[i] = next[i];
      if (group < groups) next[i] = page_of(list, group * kPages + i);
    }
    V factor = jump;  // of zeros in the first group
    for (std::size_t at = 0; at < kPageBytes; at += kTurn) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kPages; ++i) {
        const char* const src = static_cast<const char*>(now[i].src) + at;
        char* const dst = static_cast<char*>(now[i].dst) + at;
        prefetch_step<false, kTurn>(reinterpret_cast<std::uintptr_t>(next[i].src) + at);
        const V d0 = load(src);
        const V d1 = load(src + FOLD_WIDTH);
        stream(dst, d0);
        stream(dst + FOLD_WIDTH, d1);
        even[i] = fold(even[i], factor, i == 0 ? exclusive_or(d0, initial) : d0);
        odd[i] = fold(odd[i], factor, d1);
      }
      initial = zero;
      factor = far;
    }
  }
  for (std::size_t i = 1; i < kPages; ++i) {
    even[i] = fold(even[i - 1], page, even[i]);
    odd[i] = fold(odd[i - 1], page, odd[i]);
  }
  alignas(64) char rest[FOLD_WIDTH];
  store(rest, fold(even[kPages - 1], near, odd[kPages - 1]));
  return crc_words(rest, FOLD_WIDTH, 0);
}

// REQUIRES: run_bytes is at least kStep and a multiple of FOLD_WIDTH, for several runs a multiple
// of kStep; if kCopy, every dst is aligned to FOLD_WIDTH.
template <bool kCopy, bool kLongRuns>
FOLD_TARGET std::uint32_t fold_runs(const RunList& list, std::uint32_t state) noexcept {
  const V far = fold_constants(fold_constant(kStep * 8 - 32), fold_constant(kStep * 8 + 32));
  const V near =
      fold_constants(fold_constant(FOLD_WIDTH * 8 - 32), fold_constant(FOLD_WIDTH * 8 + 32));
  const char* src = static_cast<const char*>(list.runs[0].src);
  char* dst = static_cast<char*>(list.runs[0].dst);

  Lanes lanes{load(src), load(src + FOLD_WIDTH), load(src + 2 * FOLD_WIDTH),
              load(src + 3 * FOLD_WIDTH)};
  put<kCopy>(dst, lanes.a0);
  put<kCopy>(dst + FOLD_WIDTH, lanes.a1);
  put<kCopy>(dst + 2 * FOLD_WIDTH, lanes.a2);
  put<kCopy>(dst + 3 * FOLD_WIDTH, lanes.a3);
  lanes.a0 = exclusive_or(lanes.a0, set_crc(state));

  const std::size_t whole = list.run_bytes / kStep * kStep;
  // The first part of a run prefetches from the same run, the rest from the beginning of a later
  // run.
  constexpr std::size_t kAhead = kPrefetchBytes<kLongRuns>;
  const std::size_t inner = whole > kAhead ? (whole - kAhead) / kStep * kStep : 0;
  const std::size_t runs_ahead = (kAhead + whole - 1) / whole;
  std::size_t at = kStep;
  for (std::size_t i = 0;;) {
    if (at < inner) {
      fold_steps<kCopy, kLongRuns>(dst, src, at, inner, whole - inner, far, lanes);
      at = inner;
    }
    const char* later = i + runs_ahead < list.count
                            ? static_cast<const char*>(list.runs[i + runs_ahead].src)
                            : src + inner;  // no run follows: prefetch bytes of this one again
    fold_steps<kCopy, kLongRuns>(
        dst, src, at, whole,
        reinterpret_cast<std::uintptr_t>(later) - reinterpret_cast<std::uintptr_t>(src) - inner,
        far, lanes);
    at = whole;
    if (++i == list.count) {
      break;
    }
    src = static_cast<const char*>(list.runs[i].src);
    dst = static_cast<char*>(list.runs[i].dst);
    at = 0;
  }

  V last = fold(lanes.a0, near, lanes.a1);
  last = fold(last, near, lanes.a2);
  last = fold(last, near, lanes.a3);
  for (; at < list.run_bytes; at += FOLD_WIDTH) {  // only if the list has a single run
    const V d = load(src + at);
    put<kCopy>(dst + at, d);
    last = fold(last, near, d);
  }
  alignas(64) char rest[FOLD_WIDTH];
  store(rest, last);
  return crc_words(rest, FOLD_WIDTH, 0);
}

// Processes one run of any length and alignment.
template <bool kCopy>
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
  const CopyRun run{dst, src};
  const RunList list{&run, 1, body};
  state = body >= kLongRunBytes ? fold_runs<kCopy, true>(list, state)
                                : fold_runs<kCopy, false>(list, state);
  return small_run<kCopy>(kCopy ? dst + body : nullptr, src + body, n - body, state);
}

FOLD_TARGET std::uint32_t copy(const RunList& list, std::uint32_t state) noexcept {
  std::uintptr_t bits = 0;
  for (std::size_t i = 0; i < list.count; ++i) {
    bits |= reinterpret_cast<std::uintptr_t>(list.runs[i].dst);
  }
  const std::size_t pages = list.count * (list.run_bytes / kPageBytes);
  if (cpu_features().intel && pages >= kPages && list.run_bytes % kPageBytes == 0 &&
      bits % FOLD_WIDTH == 0) {
    state = copy_pages(list, pages / kPages, state);
    CopyRun rest[kPages];
    const std::size_t left = pages % kPages;
    for (std::size_t i = 0; i < left; ++i) {
      rest[i] = page_of(list, pages - left + i);
    }
    return left == 0 ? state : fold_runs<true, false>(RunList{rest, left, kPageBytes}, state);
  }
  if (list.run_bytes % kStep == 0 && bits % FOLD_WIDTH == 0) {
    return list.run_bytes >= kLongRunBytes ? fold_runs<true, true>(list, state)
                                           : fold_runs<true, false>(list, state);
  }
  for (std::size_t i = 0; i < list.count; ++i) {
    state = fold_run<true>(static_cast<char*>(list.runs[i].dst),
                           static_cast<const char*>(list.runs[i].src), list.run_bytes, state);
  }
  return state;
}

FOLD_TARGET std::uint32_t checksum(const char* src, std::size_t n, std::uint32_t state) noexcept {
  return fold_run<false>(nullptr, src, n, state);
}
constexpr Kernel kKernel = {FOLD_NAME, checksum, copy};

}  // namespace FOLD_NAMESPACE
