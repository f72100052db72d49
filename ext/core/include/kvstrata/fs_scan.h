// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What lies in the directory of `fs`: names, lengths and times, no payloads.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvstrata/fs_paths.h"

namespace kvstrata {

// The clock that files' times are compared with.
inline std::int64_t now_unix_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct FsScan {
  struct Record {
    Digest key{};
    std::uint32_t length = 0;
    std::int64_t recency_unix_ns = 0;
  };
  struct Part {
    std::uint64_t number = 0;
    std::uint64_t length = 0;
  };
  std::vector<Record> records;  // oldest first
  std::vector<Part> parts;      // that were left
  std::vector<std::string> folders;
  std::uint64_t charge = 0;   // of all records together
  std::uint64_t foreign = 0;  // not named like ours, and left alone
  std::uint64_t removed = 0;  // parts and stumps
  std::string failed;         // what could not be read, after an error
};

// When a file was last used.
inline std::int64_t fs_recency(const FileStat& stat) noexcept {
  return std::max(stat.accessed_unix_ns, stat.modified_unix_ns);
}

// Reads the directory and removes stumps, and parts last written before that time. kCancelled:
// `go_on`, asked once per directory, said no.
Status scan_fs_directory(FileLayer& layer, const FsPaths& paths, std::int64_t parts_before_unix_ns,
                         const std::function<bool()>& go_on, FsScan* out);

}  // namespace kvstrata
