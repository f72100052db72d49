// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The disk log, a connector for local disks: records are appended to segments, and the oldest
// segment is evicted first (disk/format.h has the bytes). Nothing acknowledged is lost: a put is
// answered with STORED only when its record is synced, and a removal is reported only when its
// tombstone is synced.
//
//   frame:    placed -> written -> synced -> published (a record is in the index)
//   segment:  Segments::move
//
// DiskLog owns the mutex, the state that all parts share (disk/shared.h), and the threads. Each
// task has a part of its own, whose header states its invariants:
//
//   recover    finds the segments and frames in the folder when the log is opened
//   segments   files, their states, the bytes that they take
//   append     places, writes and syncs of frames; the log's mode
//   find       the index, and loads
//   retire     makes segments free: writes tables, writes some records again, evicts the others
//   put, remove
//
// A part calls only parts named before it, never DiskLog. The index lies in memory. A lock file
// makes sure that only one log uses a folder.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "disk/put.h"
#include "disk/remove.h"
#include "kvstrata/connector.h"

namespace kvstrata {

class DiskLog final : public Connector {
 public:
  // `files` must outlive it.
  explicit DiskLog(DiskOptions options, FileLayer& files = posix_files());
  ~DiskLog() override;

  ConnectorCapabilities capabilities() const noexcept override;
  std::string open(const ConnectorContext& context) override;
  void exists(std::span<ExistsItem> items) noexcept override;
  std::uint64_t list(std::uint64_t cursor, std::size_t most,
                     std::vector<Digest>* keys) noexcept override;
  void put(std::span<PutItem> piece) noexcept override;
  void put_end(std::span<PutItem> batch) noexcept override;
  void load(std::span<LoadItem> piece) noexcept override;
  void remove(std::span<DeleteItem> items) noexcept override;
  void remove_corrupt(const LoadItem& item) noexcept override;
  std::uint64_t clear() noexcept override;
  ConnectorUsage usage() noexcept override;
  void counts(std::vector<ConnectorCount>* out) noexcept override;
  void take_evicted(std::vector<Digest>* keys) noexcept override;
  void take_notes(std::vector<ConnectorNote>* notes) noexcept override;
  void close() noexcept override;

  // The length of the longest record that can be put.
  [[nodiscard]] std::uint64_t max_record_bytes() const noexcept;

 private:
  std::string lock_folder(const ConnectorContext& context);
  std::string recover();
  void keep_maintaining();

  disk::Shared shared_;
  disk::Segments segments_{shared_};
  disk::Appender appender_{shared_, segments_};
  disk::Finder finder_{shared_, segments_};
  disk::Retirer retirer_{shared_, segments_, appender_, finder_};
  disk::Putter putter_{shared_, appender_, finder_, retirer_};
  disk::Remover remover_{shared_, appender_, finder_, retirer_};
  std::unique_ptr<FileLock> folder_lock_;
  std::thread maintainer_;
};

}  // namespace kvstrata
