// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Faults the pages of a shared mapping in ahead of use, by threads of its own, in steps of 64 MiB.
// It changes no byte and blocks nobody: other threads and processes use the memory meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kvstrata/status.h"

namespace kvstrata {

class Prefault {
 public:
  Prefault() = default;
  ~Prefault() { stop(); }
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // The mapping must outlive stop(). kExists when it was started before.
  [[nodiscard]] Status start(std::uint8_t* address, std::uint64_t bytes,
                             std::uint32_t threads) noexcept;
  // Waits until the threads have ended (each finishes its present step). Idempotent.
  void stop() noexcept;
  std::uint64_t done_bytes() const noexcept { return done_bytes_.load(std::memory_order_relaxed); }
  // errno of the step that failed (no memory left, as a rule); 0 when none did.
  int error() const noexcept { return error_.load(std::memory_order_relaxed); }

 private:
  void work() noexcept;

  std::uint8_t* address_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> error_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
