// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "memory/prefault.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/threads.h"
#include "memory/page_tables.h"

namespace kvstrata {

namespace {

// Populating holds the kernel's lock of the address space. With larger steps, an mmap of another
// thread would wait for tens of milliseconds, and Python calls mmap with the GIL held.
constexpr std::uint64_t kStepBytes = Backing::kStepBytes;

}  // namespace

Status Prefault::start(std::uint8_t* address, Backing* backing, std::uint32_t threads) noexcept {
  if (!threads_.empty()) return Status(StatusCode::kExists, "prefault: already started");
  if (threads == 0 || threads > 64) {
    return Status(StatusCode::kBadArgument, "threads: must be between 1 and 64", threads, 64);
  }
  address_ = address;
  backing_ = backing;
  try {
    for (std::uint32_t i = 0; i < threads; ++i)
      threads_.push_back(start_thread([this] { work(); }));
  } catch (const std::system_error& failure) {
    if (threads_.empty())
      return Status(StatusCode::kOsError, "cannot start a thread", failure.code().value());
  }
  return Status();
}

void Prefault::stop() noexcept {
  stop_.store(true, std::memory_order_relaxed);
  if (backing_ != nullptr) backing_->stop_waiting();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  // threads_ keeps its entries, so that start() refuses to start again.
}

void Prefault::work() noexcept {
  while (!stop_.load(std::memory_order_relaxed)) {
    const std::uint64_t begin = next_.fetch_add(kStepBytes, std::memory_order_relaxed);
    const std::uint64_t bytes = backing_->bytes();
    if (begin >= bytes) return;
    const std::uint64_t length = std::min(kStepBytes, bytes - begin);
    while (!backing_->ensure(begin, length)) {
      if (stop_.load(std::memory_order_relaxed)) return;
      backing_->wait_while_short();
    }
    int failed = 0;
    do {
      failed = populate_pages(address_ + begin, length);
    } while (failed == EINTR || failed == EAGAIN);
    if (failed != 0) {
      error_.store(failed, std::memory_order_relaxed);
      stop_.store(true, std::memory_order_relaxed);
      return;
    }
    done_bytes_.fetch_add(length, std::memory_order_relaxed);
  }
}

}  // namespace kvstrata
