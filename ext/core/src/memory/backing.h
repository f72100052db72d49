// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Backing: reserves memory for a pool's file and knows which parts of the file have it. Pool files
// are sparse: on tmpfs a page gets its memory when it is first touched, and a process that touches
// a page for which no memory is left dies of SIGBUS. So every part is reserved before it is first
// touched, with fallocate(2), which fails with an error instead.
//
// Memory is reserved in steps of 2 MiB and never given back. After a failed reservation the backing
// is "short": it reserves nothing more until try_again() succeeds.
//
// Thread-safe except attach() and close().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace kvstrata {

class Backing {
 public:
  static constexpr std::uint64_t kStepBytes = 2ULL << 20;

  Backing() = default;
  ~Backing() { close(); }
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // `bytes` is the length of the file. Keeps a duplicate of `fd` until close(); `fd` stays the
  // caller's. kOsError: detail(0) is errno, and the backing must not be used. REQUIRES: attach()
  // was not called before.
  [[nodiscard]] Status attach(int fd, std::uint64_t bytes) noexcept;
  // REQUIRES: no other call is running; afterwards only const methods are called.
  void close() noexcept;

  // Reserves memory for the steps of [offset, offset + length) that have none. Returns true if the
  // whole range has memory now; false while the backing is short.
  // REQUIRES: the range lies in the file.
  [[nodiscard]] bool ensure(std::uint64_t offset, std::uint64_t length) noexcept;
  bool is_backed(std::uint64_t offset, std::uint64_t length) const noexcept;

  // While short, errno of the last failed reservation, or ECANCELED after stop_waiting(); otherwise
  // 0.
  int error() const noexcept { return error_.load(std::memory_order_acquire); }
  bool is_short() const noexcept { return error() != 0; }
  // While short: tries to reserve one step. If that succeeds, the backing is no longer short.
  void try_again() noexcept;
  // Returns once the backing is not short or stop_waiting() was called.
  void wait_while_short() noexcept;
  // Ends all present and later waits, for ever.
  void stop_waiting() noexcept;

  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t backed_bytes() const noexcept {
    return backed_bytes_.load(std::memory_order_relaxed);
  }
  // While short, the bytes that have no memory; otherwise 0.
  std::uint64_t missing_bytes() const noexcept { return is_short() ? bytes_ - backed_bytes() : 0; }

 private:
  bool is_step_backed(std::uint64_t step) const noexcept;
  bool reserve_step(std::uint64_t step) noexcept;
  std::uint64_t step_bytes(std::uint64_t step) const noexcept {
    return std::min(kStepBytes, bytes_ - step * kStepBytes);
  }
  void mark_all() noexcept;

  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  std::uint64_t steps_ = 0;
  std::mutex reserving_;                                  // no two threads count the same step
  std::unique_ptr<std::atomic<std::uint64_t>[]> backed_;  // one bit per step
  std::atomic<std::uint64_t> backed_bytes_{0};
  std::atomic<int> error_{0};  // see error()
  std::atomic<bool> stopped_{false};
};

}  // namespace kvstrata
