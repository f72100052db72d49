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
  const std::span<LoadItem> loads = piece(index);
  // The connector may drop an item's hold as soon as it has loaded the bytes, which are still
  // verified below.
  std::vector<BytesHold> kept;
  kept.reserve(loads.size());
  for (const LoadItem& item : loads)
    kept.push_back(item.hold);
  connector().load(loads);
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
  drop_holds(loads);
}

void LoadJob::end() noexcept {
  connector().take_evicted(&evicted);
}

}  // namespace kvstrata
