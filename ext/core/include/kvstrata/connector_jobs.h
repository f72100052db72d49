// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Batches of a connector as jobs of a lane. The items of a job are its own; they are whole when the
// job is done, and every hold that the connector did not keep a copy of is let go of by then.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kvstrata/connector.h"
#include "kvstrata/lanes.h"

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

class PutJob : public LaneJob {
 public:
  // REQUIRES: items is not empty, items_per_piece > 0.
  PutJob(std::shared_ptr<Connector> connector, std::vector<PutItem> items,
         std::size_t items_per_piece) noexcept
      : items(std::move(items)),
        connector_(std::move(connector)),
        items_per_piece_(items_per_piece) {}
  std::size_t pieces() const noexcept override;
  void run(std::size_t index) override;
  void end() noexcept override;

  std::vector<PutItem> items;
  std::vector<Digest> evicted;

 private:
  std::shared_ptr<Connector> connector_;
  std::size_t items_per_piece_;
};

// Checks what was loaded against the record's checksums; a bad record is removed from the medium,
// so that the next put can heal it.
class LoadJob : public LaneJob {
 public:
  // REQUIRES: as PutJob.
  LoadJob(std::shared_ptr<Connector> connector, std::vector<LoadItem> items,
          std::size_t items_per_piece) noexcept
      : items(std::move(items)),
        connector_(std::move(connector)),
        items_per_piece_(items_per_piece) {}
  std::size_t pieces() const noexcept override;
  void run(std::size_t index) override;
  void end() noexcept override;

  std::vector<LoadItem> items;
  std::vector<Digest> evicted;

 private:
  std::shared_ptr<Connector> connector_;
  std::size_t items_per_piece_;
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

// What runs one of the connector's other calls: open, clear, usage, close.
class CallConnectorJob : public LaneJob {
 public:
  enum class Call : std::uint8_t { kOpen = 0, kClear = 1, kUsage = 2, kClose = 3 };

  CallConnectorJob(std::shared_ptr<Connector> connector, Call call,
                   ConnectorContext context) noexcept
      : call(call), context(std::move(context)), connector_(std::move(connector)) {}
  void run(std::size_t index) override;

  Call call;
  ConnectorContext context;
  std::string wrong;  // of open
  std::uint64_t cleared = 0;
  ConnectorUsage usage;

 private:
  std::shared_ptr<Connector> connector_;
};

}  // namespace kvstrata
