// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The connector `fs`: one self-describing file per record in a directory of any mounted file system
// (names: fs_paths.h), which it owns alone from open() to close().
//
// A record on its way in is a part, then a name (fs_parts.h).
//
// Invariants
// 1. A record's name appears only when its bytes are on the medium, and STORED is answered when the
//    name is too: directories are synced once per batch.
// 2. Names and parts together (each rounded up to 4 KiB) never exceed the cap; the least recently
//    loaded or stored records leave before a part is written. The cap counts what earlier servers
//    left: names and lengths are read at the start, in a thread, no payload; and their directories
//    are synced, as who left them may not have lived to do it. Where parts would fill a quarter of
//    the cap, those that are written are published before their batch has ended.
// 3. The mutex is never held over I/O, so exists() is quick.
// 4. While a key's file is renamed or unlinked it is marked, and only who marked it touches it:
//    a heal cannot be unlinked by the removal of what it heals, nor a record by a late report
//    about the copy before (FsRecord::copy).
// 5. A thread that waits (for a mark, for room) has no mark and no part that only it could move on,
//    and waits only for threads that are at work: no batch depends on one that is queued behind it.
//    So a delete does not wait for the put of its key: it cancels the part.
// 6. Files that are not named like ours are never touched.
// 7. A record is removed, by remove() or clear(), when its directory is synced without it. One that
//    was evicted may be back after a power cut; one of which the medium does not say whether it is
//    there counts as there, and as evicted.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>

#include "kvstrata/fs_files.h"
#include "kvstrata/fs_index.h"
#include "kvstrata/fs_parts.h"
#include "kvstrata/fs_scan.h"

namespace kvstrata {

struct FsOptions {
  std::string base_path;  // absolute
  std::string relative_tmp_dir = "tmp";
  bool use_odirect = true;
  std::uint64_t capacity_bytes = 0;  // 0: no cap but min_free_bytes
  // To leave free on the file system; default: 1 % of it, at least 256 MiB, at most a tenth.
  std::optional<std::uint64_t> min_free_bytes;
  // Without, everything is done by the thread that calls, the reading of the directory in open().
  bool own_threads = true;
};

// What is wrong with the directory, or an empty string. Makes it, and its directory for parts.
std::string prepare_fs_directory(FileLayer& layer, const FsPaths& paths, const FsOptions& options,
                                 std::uint64_t* min_free_bytes);

// Of whoever holds a directory, for those who find it locked.
std::string fs_holder_note(const std::string& instance_id);

// Takes the directory's lock, for this server alone or side by side with those that share it.
// Returns what is wrong, or an empty string.
std::string lock_fs_directory(FileLayer& layer, const FsPaths& paths, bool shared,
                              const std::string& instance_id, std::unique_ptr<FileLock>* out);

class FsConnector final : public Connector {
 public:
  // `layer` must outlive it.
  FsConnector(FsOptions options, FileLayer& layer);
  ~FsConnector() override;

  [[nodiscard]] ConnectorCapabilities capabilities() const noexcept override;
  [[nodiscard]] std::string open(const ConnectorContext& context) override;
  [[nodiscard]] bool ready() noexcept override;
  void exists(std::span<ExistsItem> items) noexcept override;
  void heads(std::span<HeadItem> items) noexcept override;
  std::uint64_t list(std::uint64_t cursor, std::size_t most,
                     std::vector<Digest>* keys) noexcept override;
  void put(std::span<PutItem> piece) noexcept override;
  void put_end(std::span<PutItem> batch) noexcept override;
  void load(std::span<LoadItem> piece) noexcept override;
  void remove(std::span<DeleteItem> items) noexcept override;
  void remove_corrupt(const LoadItem& item) noexcept override;
  std::uint64_t clear() noexcept override;
  [[nodiscard]] ConnectorUsage usage() noexcept override;
  void take_evicted(std::vector<Digest>* keys) noexcept override;
  void take_notes(std::vector<ConnectorNote>* notes) noexcept override;
  void close() noexcept override;

 private:
  using Lock = FsParts::Lock;

  enum class Mark : std::uint8_t { kPublishing, kRemoving };
  enum class Leaving : std::uint8_t { kEvicted, kDeleted, kCorrupt };

  // fs_connector.cpp
  const char* wait_until_scanned(Lock& lock);
  FsPutOutcome put_one(PutItem& item);
  FsLoadOutcome load_one(LoadItem& item);

  // fs_publish.cpp
  void publish(Lock& lock, std::vector<std::uint64_t> claimed);
  void publish_marked(Lock& lock, std::span<const std::uint64_t> marked);
  void settle(FsPart& part, FsPutOutcome outcome);

  // fs_room.cpp
  bool take_room(Lock& lock, std::uint64_t charge);
  bool evict(Lock& lock, std::uint64_t need_bytes);
  std::vector<FsFiles::Removal> remove_records(Lock& lock, const std::vector<Digest>& keys,
                                               Leaving how);

  // fs_scan.cpp
  void scan();

  const FsOptions options_;
  const FsPaths paths_;
  FileLayer& layer_;
  NoteBook notes_;
  FsFiles files_;
  std::uint64_t min_free_bytes_ = 0;
  std::unique_ptr<FileLock> lock_;
  std::thread scanner_;

  std::mutex mutex_;
  std::condition_variable changed_;  // marks, parts, removals, the scan
  FsIndex index_;
  std::unordered_map<Digest, Mark, FsKeyHash> marks_;
  FsParts parts_{changed_};  // numbered in the order in which room was taken, that of recency
  std::uint64_t next_part_ = 0;
  std::uint64_t parts_charge_ = 0;    // of parts that are not settled
  std::uint64_t leaving_charge_ = 0;  // of records that are being unlinked
  std::vector<Digest> evicted_;       // not taken yet
  bool scanned_ = false;
  bool closing_ = false;
  const char* scan_failed_ = "";  // the reason of everything, if it did
};

}  // namespace kvstrata
