// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/connector_jobs.h"

#include "base/reason.h"
#include "record/record.h"

namespace kvstrata {

namespace {

// Drops the holds that the connector has not taken: the batch has its outcomes, so the connector
// has finished with those bytes.
template <typename Item>
void drop_holds(std::span<Item> items) noexcept {
  for (Item& item : items)
    item.hold.reset();
}

}  // namespace

void ExistsJob::run(std::size_t /*index*/) {
  connector_->exists(items);
}

void PutJob::run(std::size_t index) {
  connector().put(piece(index));
}

void PutJob::end() noexcept {
  connector().put_end(items);
  connector().take_evicted(&evicted);
  drop_holds(std::span(items));
}

void LoadJob::run(std::size_t index) {
  const Clock::time_point begun = Clock::now();
  if (index == 0) begun_ = begun;
  const std::span<LoadItem> loads = piece(index);
  // The connector may drop an item's hold as soon as it has loaded the bytes, which are still
  // verified below.
  std::vector<BytesHold> kept;
  kept.reserve(loads.size());
  for (const LoadItem& item : loads)
    kept.push_back(item.hold);
  connector().load(loads);
  const Clock::time_point loaded = Clock::now();
  for (LoadItem& item : loads) {
    if (item.status == LoadStatus::kLoaded) {
      const Status status = verify_stored_record(item.bytes, item.length, &item.key);
      if (status.code() == StatusCode::kIncompatible) {
        // A sound record of a format version that this program cannot read: a miss, and the record
        // stays where it is.
        item.status = LoadStatus::kFailed;
        item.reason = word_of(Reason::kMismatch);
      } else if (!status.ok()) {
        item.status = LoadStatus::kCorrupt;
        item.reason = word_of(Reason::kChecksum);
      }
    }
    if (item.status == LoadStatus::kCorrupt) connector().remove_corrupt(item);
  }
  loading_ += (loaded - begun).count();
  verifying_ += (Clock::now() - loaded).count();
  drop_holds(loads);
}

void LoadJob::end() noexcept {
  using Seconds = std::chrono::duration<double>;
  const double busy = static_cast<double>(loading_ + verifying_);
  const double rest_s = Seconds(Clock::now() - begun_).count();
  wait_s = Seconds(begun_ - made_).count();
  if (busy > 0) verify_s = rest_s * static_cast<double>(verifying_) / busy;
  connector().take_evicted(&evicted);
}

}  // namespace kvstrata
