// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Remembers, for each directory of `fs`, whether its name was synced in the directory above it, and
// whether it was synced since a file in it was unlinked. Thread-safe; its two mutexes are leaves of
// the lock order.
#pragma once

#include <bitset>
#include <cstddef>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/crew.h"
#include "files/notes.h"
#include "fs/paths.h"

namespace kvstrata {

class FsDurableFolders {
 public:
  // All references must outlive it. Syncs in the caller's thread and `helpers` threads of its own.
  FsDurableFolders(FileLayer& layer, const FsPaths& paths, NoteBook& notes, std::size_t helpers)
      : layer_(layer), paths_(paths), notes_(notes), crew_(helpers) {}

  struct Sync {
    std::string path;
    std::vector<std::size_t> items;  // whose outcome this sync decides
    Status status;                   // set by sync()
  };
  // Syncs all the folders and sets their `status`; a failure also becomes a note.
  void sync(std::span<Sync> folders);

  // Makes the two directories of a key, unless they are known to be durable. Appends the paths that
  // are not known to be durable to `made`; the caller syncs the directories above them. A directory
  // that existed already is appended too: its server may have died before it synced the name.
  Status make(const Digest& key, std::vector<std::string>* made);
  // Remembers that the names of the two directories of this key are durable.
  void know(const Digest& key);
  // Forgets all that know() has remembered, because another process removed some directories.
  void forget_known();

  // Remembers that a file was unlinked in the directory of this key. Called after the unlink,
  // because a sync that began before the unlink does not count.
  void note_unlinked(const Digest& key);
  // Syncs the directories in which files were unlinked since their last sync.
  void sync_unlinked();

 private:
  FileLayer& layer_;
  const FsPaths& paths_;
  NoteBook& notes_;
  Crew crew_;

  // One bit for each directory, by the first one or two bytes of the key.
  std::mutex known_mutex_;
  std::bitset<256> known_outer_;
  std::bitset<65536> known_;
  std::mutex unlinked_mutex_;
  std::bitset<65536> unlinked_;
};

}  // namespace kvstrata
