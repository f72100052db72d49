// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The connector `fs` in a directory that several servers share. Its files are those of
// fs/exclusive/connector.h, one self-describing file per record, but it has no index: it asks the
// file system which records exist. The cap belongs to the directory (fs/shared/janitor.h,
// fs/shared/sharer.h).
//
// A record is first written as a part, then renamed to its own name (fs/parts.h). A record that
// exists already, with the same length, is published without a part: its directory is synced,
// because the server that put it may have died before it synced it.
//
// Invariants
// 1. A record's name appears only when its bytes are on the medium, and STORED and EXISTS are
//    answered only when the name is on the medium too.
// 2. Records and parts of all servers together never exceed the cap: a server writes a part only
//    out of the bytes that the janitor has granted it. A put that finds too few granted bytes waits
//    up to FsSharedTimes::put_wait, then fails with THROTTLED.
// 3. A record may be deleted, evicted or replaced while another server loads it: the load gets the
//    whole record, or ABSENT.
// 4. The mutex is never held during I/O. A thread that waits for room first publishes the parts
//    that this server has written, so that they can be evicted.
//
// A server notices the evictions and deletions of other servers only when it asks the file system.
// take_evicted() names the records that this server evicted while it was the janitor.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "fs/directory.h"
#include "fs/files.h"
#include "fs/parts.h"
#include "fs/shared/sharer.h"
#include "kvstrata/connector.h"

namespace kvstrata {

class FsSharedConnector : public Connector {
 public:
  // `layer` must outlive it.
  FsSharedConnector(FsOptions options, FileLayer& layer, FsSharedTimes times = {});
  ~FsSharedConnector() override;

  [[nodiscard]] ConnectorCapabilities capabilities() const noexcept override;
  [[nodiscard]] std::string open(const ConnectorContext& context) override;
  void exists(std::span<ExistsItem> items) noexcept override;
  void heads(std::span<HeadItem> items) noexcept override;
  void put(std::span<PutItem> piece) noexcept override;
  void put_end(std::span<PutItem> batch) noexcept override;
  void load(std::span<LoadItem> piece) noexcept override;
  void remove(std::span<DeleteItem> items) noexcept override;
  void remove_corrupt(const LoadItem& item) noexcept override;
  std::uint64_t clear() noexcept override;
  [[nodiscard]] ConnectorUsage usage() noexcept override;
  void counts(std::vector<ConnectorCount>* out) noexcept override;
  void take_evicted(std::vector<Digest>* keys) noexcept override;
  void take_notes(std::vector<ConnectorNote>* notes) noexcept override;
  void close() noexcept override;

  // One turn of the sharer. Without own threads, the caller calls it.
  void tick();

 private:
  using Lock = FsParts::Lock;

  PutOutcome put_one(PutItem& item);
  PutOutcome write(Lock& lock, std::uint64_t number, const PutItem& item);
  void publish(Lock& lock, const std::vector<std::uint64_t>& claimed);
  PutOutcome outcome_of(const FsPart& part, const FsFiles::Publication& item);
  void give_up_part(const std::string& path, std::uint64_t charge);
  bool take(Lock& lock, std::uint64_t charge);
  bool make_space(Lock& lock, std::uint64_t bytes);
  bool wait_until(Lock& lock, std::chrono::nanoseconds at_most, const std::function<bool()>& there);
  LoadOutcome load_one(LoadItem& item);
  std::size_t remove_records(std::span<const std::pair<Digest, std::uint64_t>> records);
  void keep_ticking();

  const FsOptions options_;
  const FsPaths paths_;
  FileLayer& layer_;
  const FsSharedTimes times_;
  NoteBook notes_;
  FsFiles files_;
  FsSharer sharer_;
  std::uint64_t min_free_bytes_ = 0;
  std::unique_ptr<FileLock> lock_;
  std::thread ticker_;

  std::mutex mutex_;
  std::condition_variable changed_;  // of parts, and of the sharer in a turn
  std::condition_variable poked_;    // wakes the ticker
  bool poke_ = false;
  bool closing_ = false;
  FsParts parts_{changed_};
  std::uint64_t next_part_ = 0;
  // Set when a put has waited in vain. No other put waits before this time.
  std::int64_t refused_until_ns_ = INT64_MIN;
  std::uint64_t throttled_ = 0;
  std::uint64_t throttled_no_janitor_ = 0;
  std::uint64_t removed_since_scan_ = 0;
};

}  // namespace kvstrata
