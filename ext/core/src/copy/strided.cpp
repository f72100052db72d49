// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/strided.h"

#include <cstring>

namespace kvstrata {
namespace {

Status bad(const char* message, std::uint64_t value, std::uint64_t limit,
           std::size_t index) noexcept {
  return Status(StatusCode::kBadArgument, message, static_cast<std::int64_t>(value),
                static_cast<std::int64_t>(limit), static_cast<std::int64_t>(index));
}

// True if every run of the copy, from `offset` on and over all loops, ends at or before `size`.
bool fits(const StridedCopy& copy, std::uint64_t offset, std::uint64_t StridedLoop::* stride,
          std::uint64_t size) noexcept {
  std::uint64_t end = 0;
  bool wraps = __builtin_add_overflow(offset, copy.run_bytes, &end);
  for (std::size_t i = 0; i < copy.loop_count; ++i) {
    std::uint64_t reach = 0;
    wraps |= __builtin_mul_overflow(copy.loops[i].count - 1, copy.loops[i].*stride, &reach);
    wraps |= __builtin_add_overflow(end, reach, &end);
  }
  return !wraps && end <= size;
}

Status check(std::span<const StridedCopy> copies,
             std::span<const std::span<const unsigned char>> sources,
             std::uint64_t target_bytes) noexcept {
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const StridedCopy& copy = copies[i];
    if (copy.source >= sources.size()) {
      return bad("copies: no such source", copy.source, sources.size(), i);
    }
    if (copy.loop_count > StridedCopy::kMaxLoops) {
      return bad("copies: at most 8 loops", copy.loop_count, StridedCopy::kMaxLoops, i);
    }
    if (copy.run_bytes == 0) {
      return bad("copies: run_bytes must be positive", 0, 1, i);
    }
    for (std::size_t loop = 0; loop < copy.loop_count; ++loop) {
      if (copy.loops[loop].count == 0) {
        return bad("copies: a count must be positive", 0, 1, i);
      }
    }
    if (!fits(copy, copy.source_offset, &StridedLoop::source_stride, sources[copy.source].size())) {
      return bad("copies: source_offset and loops leave the source", copy.source_offset,
                 sources[copy.source].size(), i);
    }
    if (!fits(copy, copy.target_offset, &StridedLoop::target_stride, target_bytes)) {
      return bad("copies: target_offset and loops leave the target", copy.target_offset,
                 target_bytes, i);
    }
  }
  return Status();
}

void run(std::span<const StridedLoop> loops, std::uint64_t run_bytes, const unsigned char* from,
         unsigned char* to) noexcept {
  if (loops.empty()) {
    std::memcpy(to, from, run_bytes);
    return;
  }
  const StridedLoop& loop = loops.front();
  const bool innermost = loops.size() == 1;
  for (std::uint64_t i = 0; i < loop.count; ++i) {
    const unsigned char* const here = from + i * loop.source_stride;
    unsigned char* const there = to + i * loop.target_stride;
    if (innermost) {
      std::memcpy(there, here, run_bytes);
    } else {
      run(loops.subspan(1), run_bytes, here, there);
    }
  }
}

}  // namespace

Status copy_strided(std::span<const StridedCopy> copies,
                    std::span<const std::span<const unsigned char>> sources,
                    std::span<unsigned char> target) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check(copies, sources, target.size()));
  for (const StridedCopy& copy : copies) {
    run(std::span(copy.loops).first(copy.loop_count), copy.run_bytes,
        sources[copy.source].data() + copy.source_offset, target.data() + copy.target_offset);
  }
  return Status();
}

}  // namespace kvstrata
