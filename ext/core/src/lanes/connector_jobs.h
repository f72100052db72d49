// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The calls of a connector that serve lookups, puts and loads, as jobs of a lane. A job owns its
// items. When the job is done, every item has its outcome, and only holds that the connector has
// copied still exist.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
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

  // Valid from end() on. Seconds from the creation of the job to its first piece; and the share
  // of the seconds from there to its end that its threads spent on verifying.
  double wait_s = 0;
  double verify_s = 0;

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point made_ = Clock::now();
  Clock::time_point begun_;                            // of piece 0, which is taken first
  std::atomic<Clock::rep> loading_{0}, verifying_{0};  // of all pieces together
};

}  // namespace kvstrata
