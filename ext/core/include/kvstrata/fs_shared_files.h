// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What the servers that share a directory of `fs` tell each other, in <base>/.kvstrata.shared/:
//
//   lock.<id>        locked by the member of this number for life: who can lock it knows that the
//                    member is gone
//   member.<id>      what the member says (FsMemberState)
//   janitor.<n>      what the n-th janitor says (FsJanitorState); the highest one is in office
//   temp.<id>        one of them being written
//
// Files are written whole under a temporary name and renamed, and end with a checksum. They are not
// synced: they mean something only while somebody holds his lock. What cannot be read is counted
// and means nothing.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvstrata/fs_paths.h"

namespace kvstrata {

// A member's parts have numbers that begin with its own: nobody else's part has the same.
inline constexpr unsigned kFsPartBits = 24;

// Ever since it joined.
struct FsTally {
  std::uint64_t stored_bytes = 0;
  std::uint64_t stored_records = 0;
  std::uint64_t removed_bytes = 0;
  std::uint64_t removed_records = 0;
};

struct FsMemberState {
  std::string relative_tmp_dir;  // as_fs_word() of it
  std::uint64_t capacity_bytes = 0;
  std::uint64_t generation = 0;     // of the janitor that it has found itself known to
  std::uint64_t granted_bytes = 0;  // the most that it has taken from a janitor's file
  std::uint64_t taken_bytes = 0;    // charged for parts, ever
  std::uint64_t settled_bytes = 0;  // of these, what has its name
  std::uint64_t wanted_bytes = 0;   // that its puts wait for beyond what is granted
  std::uint64_t space_asks = 0;     // how often it asked for space on the file system
  std::uint64_t space_bytes = 0;    // how much, the last time
  std::uint64_t scan_asks = 0;      // how often it asked for a scan
  std::uint64_t left = 0;           // 1: it has ended, and takes no more
  FsTally tally;
};

struct FsGrant {
  std::uint64_t granted_bytes = 0;  // ever
  std::uint64_t space_done = 0;     // the last of its asks that was answered
  FsTally seen;
};

struct FsJanitorState {
  std::uint64_t beat = 0;
  std::uint64_t left = 0;         // 1: nobody is in office
  std::uint64_t bound_known = 0;  // 1: bound_bytes is
  std::uint64_t bound_bytes = 0;  // charge of all records and parts and of what is granted, at most
  std::uint64_t used_bytes = 0;   // charge of all records, about
  std::uint64_t records = 0;
  std::uint64_t scans = 0;
  std::uint64_t oldest_unix_ns = 0;  // when the next one to leave was last used
  std::map<std::uint64_t, FsGrant> grants;
};

// A text without spaces and line ends, another one for each name.
std::string as_fs_word(const std::string& name);

std::string encode(const FsMemberState& state);
std::string encode(const FsJanitorState& state);
[[nodiscard]] bool decode(const std::string& text, FsMemberState* out);
[[nodiscard]] bool decode(const std::string& text, FsJanitorState* out);

class FsSharedFiles {
 public:
  // Both must outlive it.
  FsSharedFiles(FileLayer& layer, const FsPaths& paths) : layer_(layer), folder_(paths.shared()) {}

  struct Listing {  // sorted
    std::vector<std::uint64_t> locks;
    std::vector<std::uint64_t> members;
    std::vector<std::uint64_t> janitors;
    std::uint64_t foreign = 0;  // neither
    [[nodiscard]] std::uint64_t highest() const { return janitors.empty() ? 0 : janitors.back(); }
  };

  Status make_folder();
  Status list(Listing* out);
  // kBusy: it lives.
  Status lock(std::uint64_t id, std::unique_ptr<FileLock>* out, std::string* holder);
  // kCorrupt: it cannot be understood.
  Status read_member(std::uint64_t id, FsMemberState* out);
  Status read_janitor(std::uint64_t generation, FsJanitorState* out, std::string* text);
  Status write_member(std::uint64_t id, const FsMemberState& state);
  // EEXIST: somebody else has this office.
  Status take_office(std::uint64_t generation);
  Status write_janitor(std::uint64_t generation, std::uint64_t writer, const FsJanitorState& state);
  // The file system's own clock.
  Status now(std::uint64_t writer, std::int64_t* unix_ns);
  void forget_member(std::uint64_t id);
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
