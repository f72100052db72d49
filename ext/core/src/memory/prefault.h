// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Prefault: threads that fault in the pages of a shared mapping ahead of use, in small steps. Each
// step is reserved (Backing) before it is touched; while no memory is left, the threads wait, and
// they end once the backing has reached its limit. The threads change no byte, and other threads
// and processes can use the mapping meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/status.h"
#include "memory/backing.h"

namespace kvstrata {

class Prefault {
 public:
  Prefault() = default;
  ~Prefault() { stop(); }
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // `address` is the mapping of the file of `backing`; both must outlive stop(). kExists: start()
  // was called before. kBadArgument: `threads` is not 1 .. 64. kOsError: not even one thread could
  // be started; detail(0) is errno.
  [[nodiscard]] Status start(std::uint8_t* address, Backing* backing,
                             std::uint32_t threads) noexcept;
  // Ends the waits of the backing (Backing::stop_waiting), then joins the threads; each finishes
  // its present step. Idempotent. A stopped prefault cannot be started again.
  void stop() noexcept;
  std::uint64_t done_bytes() const noexcept { return done_bytes_.load(std::memory_order_relaxed); }
  // errno of a step that could not be faulted in although its memory was reserved; otherwise 0.
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
