// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The files of `fs`: writing, publishing, reading and unlinking them durably. Knows nothing of caps
// and recency, and keeps nothing but which directories are durable. Thread-safe.
//
// Invariant: a record's name appears only when its bytes are on the medium (write_part, then
// publish), and publish() says so only when the name is too.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvstrata/connector.h"
#include "kvstrata/crew.h"
#include "kvstrata/fs_paths.h"

namespace kvstrata {

// Sentences for the log; beyond a limit only their number is kept. Thread-safe.
class NoteBook {
 public:
  void add(bool warning, std::string text);
  void take(std::vector<ConnectorNote>* out);

 private:
  static constexpr std::size_t kLimit = 32;
  std::mutex mutex_;
  std::vector<ConnectorNote> notes_;
  std::uint64_t dropped_ = 0;
};

// Whether the medium has no room left (of the disk or a quota).
bool is_no_space(const Status& status) noexcept;
// Whether there is no such file or directory.
bool is_not_there(const Status& status) noexcept;

using FsPutOutcome = std::pair<PutStatus, const char*>;
using FsLoadOutcome = std::pair<LoadStatus, const char*>;

// Of a record that could not be written or named.
FsPutOutcome fs_put_failure(const Status& status) noexcept;

class FsFiles {
 public:
  // All must outlive it.
  // Syncs directories in so many threads of its own and the caller's.
  FsFiles(FileLayer& layer, const FsPaths& paths, bool direct, NoteBook& notes, std::size_t helpers)
      : layer_(layer), paths_(paths), notes_(notes), direct_(direct), crew_(helpers) {}

  // Writes a new file and syncs it. After an error nothing is there. `accessed_unix_ns` is set as
  // its access time unless it is 0.
  Status write_part(const std::string& path, const std::uint8_t* bytes, std::uint64_t length,
                    std::int64_t accessed_unix_ns = 0);

  // What a server that was killed had renamed or unlinked and not synced is as it left it, and may
  // be otherwise after a power cut, until these directories are synced.
  void sync_folders(std::span<const std::string> paths);

  struct Publication {
    Digest key{};
    std::string part;      // empty: another server has published it
    Status status;         // set by publish()
    bool renamed = false;  // what was there under the key before is gone
  };
  // Renames synced parts to their names, then syncs every directory that changed, or that another
  // server may not have lived to sync, once. Where an item with a part fails, neither its part nor
  // its name is left.
  void publish(std::span<Publication> items);

  enum class Read : std::uint8_t { kWhole, kAbsent, kOtherLength, kTorn, kFailed };
  // Says of a file that is read what to set as its access time, or 0.
  using SeeFile = std::function<std::int64_t(const FileStat& file)>;
  // Reads a record of exactly `length` bytes. kOtherLength: a whole one of another length is there.
  Read read(const Digest& key, std::uint8_t* bytes, std::uint64_t length, const SeeFile& see);
  static FsLoadOutcome outcome_of(Read read) noexcept;

  // The first bytes of a record; none where there are not so many, or they cannot be read: the load
  // of that record will say what is wrong.
  void read_head(HeadItem& item);

  enum class After : std::uint8_t {
    kThere,         // as before
    kPerhapsThere,  // the medium does not say
    kGone,          // and back after a power cut, perhaps
    kGoneForGood,
  };
  struct Removal {
    Digest key{};
    After after = After::kThere;  // set by unlink()
  };
  // Without `durable` the directories are not synced, and nothing is gone for good.
  void unlink(std::span<Removal> items, bool durable);

  // Syncs the directories of which something went that is not gone for good.
  void sync_unlinked();

  // Unlinks what an operation that failed has left; where that fails too, a later start removes it.
  void discard(const std::string& path);

 private:
  struct Folder {
    std::string path;
    std::vector<std::size_t> items;  // whose outcome its sync decides
    Status status;
  };

  Status open_at_best(const std::string& path, FileMode mode, std::unique_ptr<File>* out);
  Status write_file(const std::string& path, const std::uint8_t* bytes, std::uint64_t length,
                    std::int64_t accessed_unix_ns);
  Status rename_into_place(const Publication& item, std::vector<std::string>* made);
  Status make_shard(const Digest& key, std::vector<std::string>* made);
  Read read_other_length(const std::string& path, const Digest& key, std::uint64_t found,
                         std::uint64_t asked);
  void sync_all(std::vector<Folder>& folders);
  void note_unlinked(const Digest& key);

  FileLayer& layer_;
  const FsPaths& paths_;
  NoteBook& notes_;
  std::atomic<bool> direct_;
  Crew crew_;

  // Directories that are there, with their own entries synced; by the first one or two bytes.
  std::mutex known_mutex_;
  std::bitset<256> known_outer_;
  std::bitset<65536> known_;
  // Directories that something was unlinked in since they were synced.
  std::mutex unlinked_mutex_;
  std::bitset<65536> unlinked_;
};

}  // namespace kvstrata
