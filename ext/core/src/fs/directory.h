// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Prepares the directory of `fs` before any record is touched: its options, a check that it can be
// used, and its lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "files/files.h"
#include "fs/paths.h"

namespace kvstrata {

struct FsOptions {
  std::string base_path;  // absolute
  std::string relative_tmp_dir = "tmp";
  bool use_odirect = true;
  std::uint64_t capacity_bytes = 0;  // 0: no cap but min_free_bytes
  // Space to leave free on the file system. Default: 1 % of its size, but at least the smaller of
  // 256 MiB and a tenth of its size.
  std::optional<std::uint64_t> min_free_bytes;
  // Without threads of its own the connector works in the caller's thread only; open() then reads
  // the whole directory.
  bool own_threads = true;
};

// Makes the directory and its directory for parts, and sets `*min_free_bytes`. Returns an empty
// string, or a message that says what is wrong with the directory and what to do.
std::string prepare_fs_directory(FileLayer& layer, const FsPaths& paths, const FsOptions& options,
                                 std::uint64_t* min_free_bytes);

// The text that the holder of the lock writes into the lock file, for servers that find the
// directory locked.
std::string fs_holder_note(const std::string& instance_id);

// Takes the directory's lock: for this server alone, or side by side with other servers that share
// the directory. Returns an empty string, or a message that names the holder of the directory, or
// the error, and says what to do.
std::string lock_fs_directory(FileLayer& layer, const FsPaths& paths, bool shared,
                              const std::string& instance_id, std::unique_ptr<FileLock>* out);

}  // namespace kvstrata
