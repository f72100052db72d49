// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Writes, publishes, reads and unlinks the files of `fs`, durably. Knows nothing of caps and
// recency. Thread-safe.
//
// Invariant: a record's name appears only when its bytes are on the medium (write_part, then
// publish), and publish() reports success only when the name is on the medium too. So each
// directory is known by whether its name was synced in the directory above it, and whether it was
// synced since a file in it was unlinked. The two mutexes for that are leaves of the lock order.
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/crew.h"
#include "files/notes.h"
#include "files/outcome.h"
#include "fs/paths.h"
#include "kvstrata/connector.h"

namespace kvstrata {

class FsFiles {
 public:
  // Threads that sync the directories of a batch, besides the caller's.
  static constexpr std::size_t kSyncThreads = 3;

  // All references must outlive it. Without `own_threads` only the caller's thread syncs.
  FsFiles(FileLayer& layer, const FsPaths& paths, bool direct, NoteBook& notes, bool own_threads)
      : layer_(layer),
        paths_(paths),
        notes_(notes),
        opener_(layer, direct, notes),
        crew_(own_threads ? kSyncThreads : 0) {}

  struct NewPart {
    std::string path;
    const std::uint8_t* bytes;
    std::uint64_t length;
  };
  // Writes a new file and syncs it, if the file system has `need_bytes` free besides
  // `min_free_bytes`. After an error no file is left. If the error is_no_space(), `missing_bytes`
  // is how much space should be freed before another try.
  Status write_part(const NewPart& part, std::uint64_t need_bytes, std::uint64_t min_free_bytes,
                    std::uint64_t* missing_bytes);

  // Syncs these directories: a server that was killed may have renamed or unlinked files in them
  // without a sync, which a power cut could undo.
  void sync_folders(std::span<const std::string> paths);

  struct Publication {
    Digest key{};
    std::string part;
    Status status;            // set by publish()
    bool renamed = false;     // the part has the record's name; a record that had it before is gone
    bool keeps_part = false;  // if the medium is full, so that it can be published later
  };
  // Renames synced parts to their records' names. Then syncs, once each, the directories that
  // changed. If an item fails, neither the part nor the name is left, but for `keeps_part`.
  void publish(std::span<Publication> items);

  enum class Read : std::uint8_t { kWhole, kAbsent, kTorn, kFailed };
  // Gets the stat of the file that is read, and returns the access time to set, or 0 for none.
  using SeeFile = std::function<std::int64_t(const FileStat& file)>;
  // Reads the file of item.key, and sets item.length to the file's length. kTorn: the file is no
  // record of the key that fits into item.length.
  Read read(LoadItem& item, const SeeFile& see);
  static LoadOutcome outcome_of(Read read) noexcept;

  enum class After : std::uint8_t {
    kThere,         // it could not be unlinked
    kPerhapsThere,  // the medium does not say whether it is there
    kGone,          // a power cut may bring it back
    kGoneForGood,
  };
  struct Removal {
    Digest key{};
    After after = After::kThere;  // set by unlink()
  };
  // Unlinks records. Without `durable` the directories are not synced, so no record is
  // kGoneForGood.
  void unlink(std::span<Removal> items, bool durable);

  // Syncs the directories in which a power cut may bring unlinked files back.
  void sync_unlinked();

  // Unlinks the file that a failed operation has left. If the unlink fails too, it becomes a note;
  // a later start removes parts.
  void discard(const std::string& path);

 private:
  struct Sync {
    std::string path;
    std::vector<std::size_t> items;  // whose outcome this sync decides
    Status status;                   // set by sync()
  };

  Status write_file(const NewPart& part);
  Status rename_into_place(const Publication& item, std::vector<std::string>* made);
  // Makes the two directories of a key, unless they are known to be durable. Appends the paths that
  // are not known to be durable to `made`; the caller syncs the directories above them. A directory
  // that existed already is appended too: its server may have died before it synced the name.
  Status make_folders_of(const Digest& key, std::vector<std::string>* made);
  // Syncs all the folders and sets their `status`; a failure also becomes a note.
  void sync(std::span<Sync> folders);
  // Remembers that a file was unlinked in the directory of this key. Called after the unlink,
  // because a sync that began before the unlink does not count.
  void note_unlinked(const Digest& key);

  FileLayer& layer_;
  const FsPaths& paths_;
  NoteBook& notes_;
  FileOpener opener_;
  Crew crew_;

  // One bit for each directory, by the first one or two bytes of the key.
  std::mutex known_mutex_;
  std::bitset<256> known_outer_;
  std::bitset<65536> known_;
  std::mutex unlinked_mutex_;
  std::bitset<65536> unlinked_;
};

}  // namespace kvstrata
