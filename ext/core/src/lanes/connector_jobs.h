// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The calls of a connector as jobs of a lane. A job owns its items. When the job is done, every
// item has its outcome, and only holds that the connector has copied still exist.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvstrata/connector.h"
#include "lanes/lanes.h"

namespace kvstrata {

class ExistsJob : public LaneJob {
 public:
  ExistsJob(std::shared_ptr<Connector> connector, std::vector<ExistsItem> items) noexcept
      : items(std::move(items)), connector_(std::move(connector)) {}
  void run(std::size_t index) override;

  std::vector<ExistsItem> items;

 private:
  std::shared_ptr<Connector> connector_;
};

class ListJob : public LaneJob {
 public:
  ListJob(std::shared_ptr<Connector> connector, std::uint64_t cursor, std::size_t most) noexcept
      : cursor(cursor), connector_(std::move(connector)), most_(most) {}
  void run(std::size_t index) override;

  // Before run(), the cursor of this call; afterwards, of the next call.
  std::uint64_t cursor;
  std::vector<Digest> keys;

 private:
  std::shared_ptr<Connector> connector_;
  std::size_t most_;
};

// A batch of puts or loads, cut into pieces that run on several threads at the same time.
template <typename T>
class BatchJob : public LaneJob {
 public:
  using Item = T;

  // REQUIRES: items is not empty, items_per_piece > 0.
  BatchJob(std::shared_ptr<Connector> connector, std::vector<Item> items,
           std::size_t items_per_piece) noexcept
      : items(std::move(items)),
        connector_(std::move(connector)),
        items_per_piece_(items_per_piece) {}
  std::size_t pieces() const noexcept override {
    return (items.size() + items_per_piece_ - 1) / items_per_piece_;
  }

  std::vector<Item> items;
  std::vector<Digest> evicted;

 protected:
  std::span<Item> piece(std::size_t index) noexcept {
    const std::size_t begin = index * items_per_piece_;
    return std::span(items).subspan(begin, std::min(items_per_piece_, items.size() - begin));
  }
  Connector& connector() noexcept { return *connector_; }

 private:
  std::shared_ptr<Connector> connector_;
  std::size_t items_per_piece_;
};

class PutJob : public BatchJob<PutItem> {
 public:
  using BatchJob::BatchJob;
  void run(std::size_t index) override;
  void end() noexcept override;
};

// Verifies each loaded record against its checksums, and removes a corrupt record from the medium,
// so that the next put can replace it.
class LoadJob : public BatchJob<LoadItem> {
 public:
  using BatchJob::BatchJob;
  void run(std::size_t index) override;
  void end() noexcept override;
};

class DeleteJob : public LaneJob {
 public:
  DeleteJob(std::shared_ptr<Connector> connector, std::vector<DeleteItem> items) noexcept
      : items(std::move(items)), connector_(std::move(connector)) {}
  void run(std::size_t index) override;

  std::vector<DeleteItem> items;

 private:
  std::shared_ptr<Connector> connector_;
};

// Runs one of the connector's other calls: open, clear, usage or close.
class CallConnectorJob : public LaneJob {
 public:
  enum class Call : std::uint8_t { kOpen = 0, kClear = 1, kUsage = 2, kClose = 3 };

  CallConnectorJob(std::shared_ptr<Connector> connector, Call call,
                   ConnectorContext context) noexcept
      : call(call), context(std::move(context)), connector_(std::move(connector)) {}
  void run(std::size_t index) override;

  Call call;
  ConnectorContext context;
  std::string wrong;  // the result of open(): empty on success
  std::uint64_t cleared = 0;
  ConnectorUsage usage;

 private:
  std::shared_ptr<Connector> connector_;
};

}  // namespace kvstrata
