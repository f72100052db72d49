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
//
// A part calls only parts named before it, never DiskLog, which puts and removes by them: a put
// writes its frames piece by piece, and the end of its batch syncs and publishes them; a removal
// appends and syncs a tombstone for each key, or one clear for all. The index lies in memory. A
// lock file makes sure that only one log uses a folder.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "disk/append.h"
#include "disk/find.h"
#include "disk/retire.h"
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
  void put_one(disk::Lock& lock, PutItem& item) noexcept;
  // Takes the records out of the index, and sets `removed` where a synced tombstone names the key.
  // A record that left the index without such a tombstone may come back at the next open. `copy`:
  // the sequence of the only copy to remove; 0: any record of a key. Unlocks the mutex.
  void remove(disk::Lock& lock, std::span<DeleteItem> items, std::uint64_t copy) noexcept;
  void remove_copy(disk::Lock& lock, const LoadItem& item) noexcept;
  [[nodiscard]] bool is_there(const Digest& key, std::uint64_t copy) noexcept;

  disk::Shared shared_;
  disk::Segments segments_{shared_};
  disk::Appender appender_{shared_, segments_};
  disk::Finder finder_{shared_, segments_};
  disk::Retirer retirer_{shared_, segments_, appender_, finder_};
  // Written frames, by sequence, from put() to put_end().
  std::map<std::uint64_t, disk::PlacedFrame> puts_;
  std::unique_ptr<FileLock> folder_lock_;
  std::thread maintainer_;
};

}  // namespace kvstrata
