// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The connector `fs`: one self-describing file per record in a directory of any mounted file system
// (names: fs/paths.h). From open() to close() it owns the directory alone, or its folder in a
// directory that servers share: there it also finds and loads the records of the others, and
// remove() and clear() concern its own records only (fs/others.h).
//
// A record is first written as a part, then renamed to its own name (FsPart).
//
// Invariants
// 1. A record's name appears only when its bytes are on the medium, and STORED is answered only
//    when the name is on the medium too. Directories are synced once per batch.
// 2. Its records and parts together (each rounded up to 4 KiB) never exceed the cap: the least
// recently
//    loaded or stored records are evicted before a part is written. Records that earlier servers
//    left count too: at the start a thread reads their names and lengths, but no payloads, and
//    syncs their directories, because those servers may have died before they did so. When parts
//    would take more than a quarter of the cap, the written parts are published before their batch
//    has ended.
// 3. The mutex is never held during I/O, so exists() is quick, except in a shared directory.
// 4. While a key's file is being renamed or unlinked, the key is marked, and only the thread that
//    marked it touches the file. So the removal of a corrupt record cannot unlink the record that
//    replaces it, and a late report about an old copy cannot remove a newer one (FsRecord::copy).
// 5. A thread that waits (for a mark or for room) has no mark, and no part that only this thread
//    could publish. It waits only for threads that are running: no batch depends on a batch that is
//    queued behind it. Therefore a delete does not wait for a put of its key but cancels the part.
// 6. Files whose names are not ours are never touched.
// 7. remove() and clear() count a record as removed when its directory was synced without it. An
//    evicted record may be back after a power cut. If the medium does not say whether a record
//    still exists, the record counts as existing, and is also reported as evicted.
// 8. Concurrent puts of one record write it once: the first item makes the part, the others join it
//    and get its outcome. The thread that claims a part publishes it, whichever batch it belongs
//    to. A part is kept until every item that made or joined it has its outcome.
// 9. Where the file system has less room than the cap, or fewer names (inodes), records are evicted
//    for what is missing, and a put is refused only when that does not help.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "fs/directory.h"
#include "fs/files.h"
#include "fs/index.h"
#include "fs/others.h"
#include "fs/scan.h"

namespace kvstrata {

// A record that is being stored. It is first a *part*, a file under a temporary name, which is then
// renamed to the record's name.
enum class FsPartState : std::uint8_t {
  kWriting,  // a thread is writing it
  kWritten,  // synced under a temporary name, or its record exists already
  kClaimed,  // a thread is publishing it
  kSettled,  // its outcome is known, and kept until every batch that asked for it has ended
};

struct FsPart {
  Digest key{};
  Digest parent{};  // set by the maker, see FsRecord
  std::uint32_t length = 0;
  FsPartState state = FsPartState::kWriting;  // goes only forward
  bool cancelled = false;                     // the key was deleted meanwhile
  std::uint32_t askers = 0;  // items that made or joined it and have not got its outcome yet
  PutOutcome outcome{PutStatus::kFailed, Reason::kInternal};
};

class FsConnector final : public Connector {
 public:
  // `layer` must outlive it.
  FsConnector(FsOptions options, FileLayer& layer);
  ~FsConnector() override;

  [[nodiscard]] ConnectorCapabilities capabilities() const noexcept override;
  [[nodiscard]] std::string open(const ConnectorContext& context) override;
  [[nodiscard]] bool ready() noexcept override;
  void exists(std::span<ExistsItem> items) noexcept override;
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
  using Lock = std::unique_lock<std::mutex>;

  enum class Mark : std::uint8_t { kPublishing, kRemoving };
  enum class Leaving : std::uint8_t { kEvicted, kDeleted, kCorrupt };

  void scan();
  Reason wait_until_scanned(Lock& lock);
  void find(std::span<ExistsItem> items);
  PutOutcome put_one(PutItem& item);
  Status write_part(Lock& lock, const FsFiles::NewPart& file, std::uint64_t charge);
  LoadOutcome load_one(LoadItem& item);
  // Joins the item to the part of the same record that is neither settled nor cancelled. False:
  // there is no such part.
  bool join(PutItem& item);
  bool cancel_parts(const Digest& key);
  bool publish_written(Lock& lock);
  void publish(Lock& lock, std::vector<std::uint64_t> claimed);
  void publish_marked(Lock& lock, std::span<const std::uint64_t> marked,
                      std::vector<std::uint64_t>* unnamed);
  void settle(FsPart& part, PutOutcome outcome);
  bool take_room(Lock& lock, std::uint64_t charge);
  bool evict(Lock& lock, std::uint64_t need_bytes, std::size_t count = 1);
  std::vector<FsFiles::Removal> remove_records(Lock& lock, const std::vector<Digest>& keys,
                                               Leaving how);

  const FsOptions options_;
  FsPaths paths_;  // set by open()
  FileLayer& layer_;
  NoteBook notes_;
  FsFiles files_;
  FsOthers others_;
  std::uint64_t min_free_bytes_ = 0;
  std::unique_ptr<FileLock> lock_;
  std::thread scanner_;

  std::mutex mutex_;
  std::condition_variable changed_;  // for marks, parts, records that leave, and the scan
  FsIndex index_;
  std::unordered_map<Digest, Mark, KeyHash> marks_;
  std::map<std::uint64_t, FsPart> parts_;  // numbered in the order in which they took room
  std::uint64_t next_part_ = 0;
  std::uint64_t parts_charge_ = 0;    // of parts that are not settled
  std::uint64_t leaving_charge_ = 0;  // of records that are being unlinked
  std::vector<Digest> evicted_;       // not taken yet
  bool scanned_ = false;
  bool closing_ = false;
  Reason scan_failed_ = Reason::kNone;  // if the scan failed: the reason of all later calls
};

}  // namespace kvstrata
