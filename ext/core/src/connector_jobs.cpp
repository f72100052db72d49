// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/connector_jobs.h"

#include <exception>

#include "kvstrata/copy_engine.h"
#include "kvstrata/record.h"

namespace kvstrata {

namespace {

// What the connector left in `hold` has no use any more once its batch has an outcome.
template <typename Item>
void let_go(std::span<Item> items) noexcept {
  for (Item& item : items)
    item.hold.reset();
}

}  // namespace

void ExistsJob::run(std::size_t /*index*/) {
  connector_->exists(items);
}

void HeadsJob::run(std::size_t /*index*/) {
  connector_->heads(items);
}

void ListJob::run(std::size_t /*index*/) {
  cursor = connector_->list(cursor, most_, &keys);
}

void PutJob::run(std::size_t index) {
  connector().put(piece(index));
}

void PutJob::end() noexcept {
  connector().put_end(items);
  connector().take_evicted(&evicted);
  let_go(std::span(items));
}

void LoadJob::run(std::size_t index) {
  const std::span<LoadItem> loads = piece(index);
  // The connector may let go of a hold as soon as its bytes are there; they are looked at after.
  std::vector<BytesHold> kept;
  kept.reserve(loads.size());
  for (const LoadItem& item : loads)
    kept.push_back(item.hold);
  connector().load(loads);
  for (LoadItem& item : loads) {
    if (item.status == LoadStatus::kLoaded) {
      const Status status = verify_stored_record(item.bytes, item.length, &item.key);
      if (status.code() == StatusCode::kIncompatible) {
        // Sound, but of a version that this one does not read: a miss that destroys nothing.
        item.status = LoadStatus::kFailed;
        item.reason = "mismatch";
      } else if (!status.ok()) {
        item.status = LoadStatus::kCorrupt;
        item.reason = "checksum";
      }
    }
    if (item.status == LoadStatus::kCorrupt) connector().remove_corrupt(item);
  }
  let_go(loads);
}

void LoadJob::end() noexcept {
  connector().take_evicted(&evicted);
}

void DeleteJob::run(std::size_t /*index*/) {
  connector_->remove(items);
}

void CallConnectorJob::run(std::size_t /*index*/) {
  switch (call) {
    case Call::kOpen:
      try {
        wrong = connector_->open(context);
      } catch (const std::exception& error) {
        wrong = error.what();
        if (wrong.empty()) wrong = "opening failed";
      }
      break;
    case Call::kClear:
      cleared = connector_->clear();
      break;
    case Call::kUsage:
      usage = connector_->usage();
      break;
    case Call::kClose:
      connector_->close();
      break;
  }
}

}  // namespace kvstrata
