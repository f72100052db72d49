// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Faults the pages of a shared mapping in ahead of use, by threads of its own, in small steps, each
// after its memory was reserved. It changes no byte and blocks nobody: other threads and processes
// use the memory meanwhile. Where there is no memory it waits until there is.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kvstrata/backing.h"
#include "kvstrata/status.h"

namespace kvstrata {

class Prefault {
 public:
  Prefault() = default;
  ~Prefault() { stop(); }
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // The mapping of the file behind `backing` must outlive stop(), as `backing` must. kExists when
  // it was started before.
  [[nodiscard]] Status start(std::uint8_t* address, Backing* backing,
                             std::uint32_t threads) noexcept;
  // Waits until the threads have ended (each finishes its present step). Idempotent.
  void stop() noexcept;
  std::uint64_t done_bytes() const noexcept { return done_bytes_.load(std::memory_order_relaxed); }
  // errno of the step that failed though its memory was reserved; 0 when none did.
  int error() const noexcept { return error_.load(std::memory_order_relaxed); }

 private:
  void work() noexcept;

  std::uint8_t* address_ = nullptr;
  Backing* backing_ = nullptr;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<bool> stop_{false};
  std::atomic<int> error_{0};
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
