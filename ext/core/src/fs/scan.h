// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Reads the names, lengths and times of the files in an `fs` directory, but no payloads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fs/paths.h"

namespace kvstrata {

struct FsScan {
  struct Record {
    Digest key{};
    std::uint32_t length = 0;
    std::int64_t recency_unix_ns = 0;
  };
  std::vector<Record> records;  // oldest first
  std::vector<std::string> folders;
  std::uint64_t charge = 0;   // of all records together
  std::uint64_t foreign = 0;  // entries whose names are not ours; they are left alone
  std::uint64_t removed = 0;  // parts, and records of an impossible length
  std::string failed;         // after an error: which path could not be read, and why
};

// Reads the directory. Removes parts and records of an impossible length. kCancelled: `go_on`,
// asked once per directory, returned false. After another error out->failed says which path could
// not be read.
Status scan_fs_directory(FileLayer& layer, const FsPaths& paths, const std::function<bool()>& go_on,
                         FsScan* out);

}  // namespace kvstrata
