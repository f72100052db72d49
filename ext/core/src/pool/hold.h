// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "pool/index.h"

namespace kvstrata {

class Pool;

// A reference to an entry's extent: while it lives, the extent's bytes belong to that entry.
// Move-only. It may be dropped from any thread at any time, after Pool::close() too, and keeps the
// mapping alive.
// An extent whose reservation was aborted stays until its last hold is dropped.
//
// Dropping a hold locks the pool's mutex, a leaf of the lock order, so a thread drops a hold only
// while it has none of our locks (base/README.md). Pool fills only Hold objects that hold nothing.
class Hold {
 public:
  Hold() noexcept = default;
  Hold(Hold&& other) noexcept;
  Hold& operator=(Hold&& other) noexcept;
  ~Hold() { drop(); }

  bool is_held() const noexcept { return held_.load(std::memory_order_acquire); }
  // Idempotent; safe against another thread's drop of the same hold.
  void drop() noexcept;

  const Key& key() const noexcept { return key_; }
  std::uint64_t offset() const noexcept { return offset_; }
  std::uint32_t length() const noexcept { return length_; }
  std::uint32_t generation() const noexcept { return generation_; }
  std::uint32_t tenant() const noexcept { return tenant_; }
  // Where the bytes lie in this process; valid while the hold object lives, even after drop().
  std::uint8_t* address() const noexcept { return address_; }
  bool is_reservation() const noexcept { return reservation_; }

 private:
  friend class Pool;
  std::shared_ptr<Pool> pool_;
  Key key_{};
  std::uint64_t offset_ = 0;
  std::uint32_t length_ = 0;
  std::uint32_t generation_ = 0;
  std::uint32_t tenant_ = 0;
  std::uint32_t entry_ = kNoEntry;
  std::uint8_t* address_ = nullptr;
  bool reservation_ = false;
  std::atomic<bool> held_{false};
};

}  // namespace kvstrata
