// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The records of the other servers that share a directory of `fs`.
//
// A server writes, evicts and deletes in its own folder only. It finds and loads the records in the
// folders of the others, whether these servers run or not, and never waits for them: a record gets
// its name only when it is whole (fs/files.h), and one that its owner evicts during a load is read
// to its end, or is ABSENT. A record that does not verify is unlinked, because its owner may never
// load it; if the owner replaces it at that moment, the new record is lost, which costs a miss.
//
// Thread-safe. All calls do I/O.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "fs/directory.h"
#include "fs/files.h"

namespace kvstrata {

class FsOthers {
 public:
  // All references must outlive it. `own`: the paths of this server, set before the first call.
  FsOthers(FileLayer& layer, const FsOptions& options, const FsPaths& own, NoteBook& notes)
      : layer_(layer), options_(options), own_(own), notes_(notes) {}

  // Looks for those items that are ABSENT until now.
  void find(std::span<ExistsItem> items);
  // Loads the record from the first folder that has it.
  LoadOutcome load(LoadItem& item);

  // Whether load() gave the item its bytes.
  [[nodiscard]] static bool loaded(const LoadItem& item) noexcept { return item.copy >> 63 != 0; }
  void remove_corrupt(const LoadItem& item);

 private:
  struct Folder {
    Folder(FileLayer& layer, const FsOptions& options, const std::string& base, NoteBook& notes)
        : paths(base, options.relative_tmp_dir),
          files(layer, paths, options.use_odirect, notes, false) {}
    const FsPaths paths;
    FsFiles files;
  };
  using Folders = std::vector<std::shared_ptr<Folder>>;

  [[nodiscard]] Folders folders();
  void list();
  void find(const Folders& folders, ExistsItem& item);

  FileLayer& layer_;
  const FsOptions& options_;
  const FsPaths& own_;
  NoteBook& notes_;
  std::mutex mutex_;
  Folders folders_;  // as find() listed them
};

}  // namespace kvstrata
