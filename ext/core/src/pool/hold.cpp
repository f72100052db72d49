// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/hold.h"

#include <utility>

#include "pool/pool.h"

namespace kvstrata {

Hold::Hold(Hold&& other) noexcept {
  *this = std::move(other);
}

Hold& Hold::operator=(Hold&& other) noexcept {
  if (this != &other) {
    drop();
    pool_ = std::move(other.pool_);
    key_ = other.key_;
    offset_ = other.offset_;
    length_ = other.length_;
    generation_ = other.generation_;
    tenant_ = other.tenant_;
    entry_ = other.entry_;
    address_ = std::exchange(other.address_, nullptr);
    reservation_ = other.reservation_;
    held_.store(other.held_.exchange(false, std::memory_order_acq_rel), std::memory_order_release);
  }
  return *this;
}

void Hold::drop() noexcept {
  if (held_.exchange(false, std::memory_order_acq_rel)) pool_->drop_hold(entry_);
}

void Pool::fill_hold(std::uint32_t entry, bool reservation, Hold* out) {
  entries_.pin(entry);
  holds_ += 1;
  Hold hold;
  hold.pool_ = shared_from_this();
  hold.key_ = entries_.index.key(entry);
  hold.offset_ = entries_.index.offset(entry);
  hold.length_ = entries_.index.length(entry);
  hold.generation_ = entries_.index.generation(entry);
  hold.tenant_ = entries_.tenant(entry);
  hold.entry_ = entry;
  hold.address_ = entries_.address(entry);
  hold.reservation_ = reservation;
  hold.held_.store(true, std::memory_order_release);
  *out = std::move(hold);
}

Status Pool::hold(const Key& key, const std::uint8_t* identity, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = entries_.index.find(key);
  if (entry == kNoEntry || entries_.index.state(entry) != EntryState::kReady ||
      !entries_.is_of(entry, identity)) {
    return Status(StatusCode::kNotFound, "key: not in the pool");
  }
  fill_hold(entry, false, out);
  return Status();
}

Status Pool::hold_reserved(std::uint64_t ticket, std::uint64_t index, Hold* out) noexcept {
  const std::lock_guard lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(check_open());
  const std::uint32_t entry = reservations_.item(ticket, index);
  if (entry == kNoEntry) return Status(StatusCode::kNotFound, "item: not reserved");
  fill_hold(entry, true, out);
  return Status();
}

void Pool::drop_hold(std::uint32_t entry) noexcept {
  const std::lock_guard lock(mutex_);
  holds_ -= 1;
  if (is_closed()) {
    // The files may be another server's by now.
    entries_.local[entry].pins -= 1;
    return;
  }
  entries_.unpin(entry);
  departures_.settle(entry);
}

}  // namespace kvstrata
