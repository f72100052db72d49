// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Which parts of a pool's file have memory. The files are sparse: on tmpfs a page takes memory when
// it is first touched, and a process that touches a page for which there is none dies of SIGBUS. So
// every part is reserved with fallocate(2), which fails with an error instead, before anybody
// touches it.
//
// The file is looked at in steps of 2 MiB. A step that has memory keeps it for good. After a
// refusal the backing is "short": nothing more is asked for until try_again() finds room.
//
// Thread-safe but for attach() and close(); nothing here takes a lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kvstrata/status.h"

namespace kvstrata {

class Backing {
 public:
  static constexpr std::uint64_t kStepBytes = 2ULL << 20;

  Backing() = default;
  ~Backing() { close(); }
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Once. Keeps a duplicate of the descriptor until close().
  [[nodiscard]] Status attach(int fd, std::uint64_t bytes) noexcept;
  // REQUIRES: no other call runs or follows but those that only read.
  void close() noexcept;

  // Whether [offset, offset + length) has memory now; reserves what has none. REQUIRES: it lies in
  // the file.
  [[nodiscard]] bool ensure(std::uint64_t offset, std::uint64_t length) noexcept;
  bool is_there(std::uint64_t offset, std::uint64_t length) const noexcept;

  // errno of the last refusal while short, otherwise 0.
  int error() const noexcept { return error_.load(std::memory_order_acquire); }
  bool is_short() const noexcept { return error() != 0; }
  // While short: asks for one step, and ends the shortage if it gets it.
  void try_again() noexcept;
  // Waits until it is not short any more, or stop_waiting() was called.
  void wait_while_short() noexcept;
  void stop_waiting() noexcept;

  std::uint64_t bytes() const noexcept { return bytes_; }
  std::uint64_t there_bytes() const noexcept {
    return there_bytes_.load(std::memory_order_relaxed);
  }
  // Bytes without memory while short, otherwise 0.
  std::uint64_t missing_bytes() const noexcept { return is_short() ? bytes_ - there_bytes() : 0; }

 private:
  bool is_step_there(std::uint64_t step) const noexcept;
  bool reserve_step(std::uint64_t step) noexcept;
  void mark_all() noexcept;

  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  std::uint64_t steps_ = 0;
  std::unique_ptr<std::atomic<std::uint64_t>[]> there_;  // a bit a step
  std::atomic<std::uint64_t> there_bytes_{0};
  std::atomic<int> error_{0};  // of the last refusal, 0 when not short
  std::atomic<bool> stopped_{false};
};

}  // namespace kvstrata
