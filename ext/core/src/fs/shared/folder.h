// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The files by which the servers that share a directory of `fs` communicate, in
// <base>/.kvstrata.shared/:
//
//   lock.<id>      locked by server <id> for life: another server that can lock it knows that <id>
//                  is gone
//   member.<id>    the state of server <id> (FsSharerState)
//   janitor.<n>    the state of the n-th janitor (FsJanitorState); the highest n is in office
//   temp.<id>      a file that server <id> is writing
//
// Files are written under a temporary name and then renamed, so that a reader sees a whole file.
// They are not synced: they mean something only while a server holds its lock. Files that cannot be
// read are ignored.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fs/paths.h"
#include "fs/shared/messages.h"

namespace kvstrata {

// A part's number is its server's number, shifted left by this, plus a counter: no two servers have
// parts of the same number.
inline constexpr unsigned kFsPartBits = 24;

class FsSharedFolder {
 public:
  // Both must outlive it.
  FsSharedFolder(FileLayer& layer, const FsPaths& paths) : layer_(layer), folder_(paths.shared()) {}

  struct Listing {  // each list is sorted
    std::vector<std::uint64_t> locks;
    std::vector<std::uint64_t> sharers;
    std::vector<std::uint64_t> janitors;
    std::uint64_t foreign = 0;  // files that are none of these
    [[nodiscard]] std::uint64_t highest() const { return janitors.empty() ? 0 : janitors.back(); }
  };

  Status make_folder();
  Status list(Listing* out);
  // Takes the lock of server `id`. kBusy: that server is running, and `holder` gets its note.
  Status lock(std::uint64_t id, std::unique_ptr<FileLock>* out, std::string* holder);
  // kCorrupt: the text is damaged.
  Status read_sharer(std::uint64_t id, FsSharerState* out);
  Status read_janitor(std::uint64_t generation, FsJanitorState* out, std::string* text);
  Status write_sharer(std::uint64_t id, const FsSharerState& state);
  // Creates the file of this janitor. EEXIST: another server was first.
  Status take_office(std::uint64_t generation);
  Status write_janitor(std::uint64_t generation, std::uint64_t writer, const FsJanitorState& state);
  // The time on the file system's clock: the modification time of a file that this call writes.
  Status now(std::uint64_t writer, std::int64_t* unix_ns);
  void forget_sharer(std::uint64_t id);
  void forget_janitor(std::uint64_t generation);

  [[nodiscard]] const std::string& folder() const noexcept { return folder_; }

 private:
  [[nodiscard]] std::string path(const char* what, std::uint64_t number) const;
  Status read(const std::string& path, std::string* text);
  Status write(const std::string& path, std::uint64_t writer, const std::string& text);

  FileLayer& layer_;
  const std::string folder_;
};

}  // namespace kvstrata
