// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "memory/page_tables.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstrata {

namespace {

constexpr std::uint64_t kStepBytes = 2ULL << 20;
constexpr std::uint64_t kPage = 4096;  // the smallest one
constexpr std::size_t kMaxStepPages = kStepBytes / kPage;

}  // namespace

int populate_pages(std::uint8_t* address, std::uint64_t bytes) noexcept {
  if (madvise(address, bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  // Kernels before 5.14.
  for (std::uint64_t at = 0; at < bytes; at += kPage)
    std::atomic_ref<std::uint8_t>(address[at]).fetch_add(0, std::memory_order_relaxed);
  return 0;
}

Status map_present_pages(std::uint8_t* address, std::uint64_t bytes,
                         std::uint64_t* mapped_bytes) noexcept {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  *mapped_bytes = 0;
  if (reinterpret_cast<std::uintptr_t>(address) % page != 0) {
    return Status(StatusCode::kBadArgument, "address: must begin a page",
                  static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address) % page));
  }
  unsigned char present[kMaxStepPages];
  for (std::uint64_t begin = 0; begin < bytes; begin += kStepBytes) {
    std::uint8_t* step = address + begin;
    const std::uint64_t length = std::min(kStepBytes, bytes - begin);
    if (mincore(step, length, present) != 0)
      return Status(StatusCode::kOsError, "mincore of a mapping failed", errno);
    const std::size_t pages = (length + page - 1) / page;
    std::size_t first = 0;
    while (first < pages) {
      std::size_t end = first;
      while (end < pages && (present[end] & 1) != 0)
        ++end;
      if (end > first) {
        const std::uint64_t run = std::min((end - first) * page, length - first * page);
        const int failed = populate_pages(step + first * page, run);
        if (failed != 0 && failed != EINTR)
          return Status(StatusCode::kOsError, "madvise(MADV_POPULATE_WRITE) failed", failed);
        *mapped_bytes += run;
      }
      first = end + 1;
    }
  }
  return Status();
}

}  // namespace kvstrata
