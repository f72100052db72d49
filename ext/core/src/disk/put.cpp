// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/put.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/patience.h"
#include "files/outcome.h"
#include "record/record.h"

namespace kvstrata::disk {

namespace {

// How long the end of a batch waits for other puts of its keys.
constexpr std::chrono::seconds kFollowWait{1};
// PutItem::copy of an item whose key another put is storing; no sequence is that high.
constexpr std::uint64_t kFollows = ~std::uint64_t{0};

// The outcome of a put that found no room or whose frame could not be written.
PutOutcome failure(const Status& status) noexcept {
  if (status.reason() != Reason::kNone) return put_refusal(status.reason());
  if (status.code() == StatusCode::kOsError) return put_refusal(file_reason(status));
  return put_refusal(Reason::kNoRoom);
}

}  // namespace

std::uint64_t Putter::max_record_bytes() const noexcept {
  const std::uint64_t taken = kSegmentHeaderBytes + kFrameHeaderBytes + table_bytes(1);
  return std::min<std::uint64_t>(shared_.options.segment_bytes - taken,
                                 UINT32_MAX - kFileBlockBytes);
}

void Putter::put(Lock& lock, std::span<PutItem> piece) noexcept {
  for (PutItem& item : piece)
    put_one(lock, item);
}

void Putter::put_one(Lock& lock, PutItem& item) noexcept {
  item.status = PutStatus::kFailed;
  if (item.length > max_record_bytes()) {
    set_outcome(item, put_refusal(Reason::kTooLarge));
    return;
  }
  if (finder_.find(item.key) != nullptr) {
    set_outcome(item, PutOutcome{PutStatus::kExists, Reason::kNone});
    return;
  }
  FrameHeader header{.kind = FrameKind::kRecord,
                     .record_bytes = item.length,
                     .key = item.key,
                     .head_crc = head_crc_of(item.bytes, item.length)};
  const std::uint64_t parent = DiskIndex::hash(parent_of_record(item.bytes, item.length));
  finder_.used(parent);
  Status status = retirer_.make_room(lock, header.frame_bytes(), 1);
  // (make_room() may have unlocked the mutex.)
  if (finder_.find(item.key) != nullptr || finder_.is_being_put(item.key)) {
    item.copy = kFollows;
    return;
  }
  if (!status.ok()) {
    set_outcome(item, failure(status));
    return;
  }
  PlacedFrame placed = appender_.place(std::move(header));
  placed.parent = parent;
  finder_.begin_put(item.key);
  lock.unlock();
  status = write_frame(placed, item.bytes);
  lock.lock();
  appender_.written(placed, status);
  if (!status.ok()) {
    finder_.end_put(item.key);
    set_outcome(item, failure(status));
    return;
  }
  item.copy = placed.header.name.sequence;
  puts_.emplace(item.copy, placed);
}

void Putter::end(Lock& lock, std::span<PutItem> batch) noexcept {
  std::uint64_t last = 0;
  for (const PutItem& item : batch) {
    if (item.copy != kFollows) last = std::max(last, item.copy);
  }
  const Status status = appender_.commit(lock, last);
  for (PutItem& item : batch) {
    if (item.copy == 0 || item.copy == kFollows) continue;
    const auto found = puts_.find(item.copy);
    if (status.ok()) {
      finder_.publish(found->second);
      shared_.counts.put_bytes += item.length;
      set_outcome(item, PutOutcome{PutStatus::kStored, Reason::kNone});
    } else {
      set_outcome(item, failure(status));
    }
    puts_.erase(found);
    finder_.end_put(item.key);
  }
  shared_.changed.notify_all();
  // This batch's own keys are published by now, so two batches that wait for each other's keys both
  // end.
  const auto until = std::chrono::steady_clock::now() + patience(kFollowWait);
  for (PutItem& item : batch) {
    if (item.copy != kFollows) continue;
    shared_.changed.wait_until(lock, until, [&] { return !finder_.is_being_put(item.key); });
    // A small log may have evicted a record of this batch already; it counts as stored.
    const bool there = finder_.find(item.key) != nullptr ||
                       std::any_of(batch.begin(), batch.end(), [&](const PutItem& other) {
                         return other.key == item.key && other.status == PutStatus::kStored;
                       });
    set_outcome(item, there ? PutOutcome{PutStatus::kExists, Reason::kNone}
                            : put_refusal(Reason::kInFlight));
  }
  // An error is ignored, because no put waits for this segment: the next put that needs room tries
  // again.
  if (!shared_.options.own_threads && !retirer_.maintaining()) (void)retirer_.maintain(lock);
}

}  // namespace kvstrata::disk
