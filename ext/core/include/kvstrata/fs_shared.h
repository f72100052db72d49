// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The connector `fs` in a directory that several servers share: the files of fs_connector.h, one
// self-describing file per record, but no index: what is there is asked of the file system. The cap
// belongs to the directory (fs_janitor.h, fs_member.h).
//
// A record on its way in is a part, then a name (fs_parts.h).
// One that is there already, of the same length, is published without a part: its directory is
// synced, as who put it may not have lived to do it.
//
// Invariants
// 1. A record's name appears only when its bytes are on the medium, and STORED and EXISTS are
//    answered when the name is too.
// 2. Names and parts of all servers together never exceed the cap: a part is written only out of
//    what the janitor has granted. A put that there is nothing for waits a bounded time.
// 3. Whoever deletes, evicts or replaces a record may do so while others load it: they get all of
//    it, or ABSENT.
// 4. The mutex is never held over I/O. A thread that waits publishes first what this server has
//    written, so that it can be evicted.
//
// What others have evicted or deleted is learned by asking or by a miss: take_evicted() names what
// this server's janitor evicted.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "kvstrata/fs_connector.h"
#include "kvstrata/fs_member.h"

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

  // Without threads of its own: one turn of the member.
  void tick();

 private:
  using Lock = FsParts::Lock;

  FsPutOutcome put_one(PutItem& item);
  FsPutOutcome write(Lock& lock, std::uint64_t number, const PutItem& item);
  void publish(Lock& lock, const std::vector<std::uint64_t>& claimed);
  FsPutOutcome outcome_of(const FsPart& part, const FsFiles::Publication& item);
  void give_up_part(const std::string& path, std::uint64_t charge);
  bool take(Lock& lock, std::uint64_t charge);
  bool make_space(Lock& lock, std::uint64_t bytes);
  bool wait_until(Lock& lock, std::chrono::nanoseconds at_most, const std::function<bool()>& there);
  FsLoadOutcome load_one(LoadItem& item);
  std::size_t remove_records(std::span<const std::pair<Digest, std::uint64_t>> records);
  void keep_ticking();

  const FsOptions options_;
  const FsPaths paths_;
  FileLayer& layer_;
  const FsSharedTimes times_;
  NoteBook notes_;
  FsFiles files_;
  FsMember member_;
  std::uint64_t min_free_bytes_ = 0;
  std::unique_ptr<FileLock> lock_;
  std::thread ticker_;

  std::mutex mutex_;
  std::condition_variable changed_;  // parts, and what the member has heard
  std::condition_variable poked_;    // for the ticker
  bool poke_ = false;
  bool closing_ = false;
  FsParts parts_{changed_};
  std::uint64_t next_part_ = 0;
  // Nothing was granted in time: until then nobody waits.
  std::int64_t refused_until_ns_ = INT64_MIN;
  std::uint64_t throttled_ = 0;
  std::uint64_t throttled_no_janitor_ = 0;
  std::uint64_t removed_since_scan_ = 0;
};

}  // namespace kvstrata
