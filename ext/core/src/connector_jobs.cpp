// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/connector_jobs.h"

#include <algorithm>
#include <exception>

#include "kvstrata/copy_engine.h"
#include "kvstrata/record.h"

namespace kvstrata {

namespace {

template <typename Item>
std::size_t pieces_of(const std::vector<Item>& items, std::size_t items_per_piece) noexcept {
  return (items.size() + items_per_piece - 1) / items_per_piece;
}

template <typename Item>
std::span<Item> piece_of(std::vector<Item>& items, std::size_t items_per_piece,
                         std::size_t index) noexcept {
  const std::size_t begin = index * items_per_piece;
  return std::span(items).subspan(begin, std::min(items_per_piece, items.size() - begin));
}

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

std::size_t PutJob::pieces() const noexcept {
  return pieces_of(items, items_per_piece_);
}

void PutJob::run(std::size_t index) {
  connector_->put(piece_of(items, items_per_piece_, index));
}

void PutJob::end() noexcept {
  connector_->put_end(items);
  connector_->take_evicted(&evicted);
  let_go(std::span(items));
}

std::size_t LoadJob::pieces() const noexcept {
  return pieces_of(items, items_per_piece_);
}

void LoadJob::run(std::size_t index) {
  const std::span<LoadItem> piece = piece_of(items, items_per_piece_, index);
  // The connector may let go of a hold as soon as its bytes are there; they are looked at after.
  std::vector<BytesHold> kept;
  kept.reserve(piece.size());
  for (const LoadItem& item : piece)
    kept.push_back(item.hold);
  connector_->load(piece);
  for (LoadItem& item : piece) {
    bool corrupt = item.status == LoadStatus::kCorrupt;
    if (item.status == LoadStatus::kLoaded) {
      const Status status = verify_record(item.bytes, item.length, &item.key);
      if (!status.ok()) {
        item.status = LoadStatus::kCorrupt;
        item.reason = "checksum";
        corrupt = true;
      }
    }
    if (corrupt) {
      DeleteItem bad{.key = item.key};
      connector_->remove(std::span(&bad, 1));
    }
  }
  let_go(piece);
}

void LoadJob::end() noexcept {
  connector_->take_evicted(&evicted);
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
