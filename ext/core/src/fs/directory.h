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
  // Servers may share the directory; each has a folder of its own there (fs/paths.h).
  bool shared = false;
  bool use_odirect = true;
  std::uint64_t capacity_bytes = 0;  // of this server's records; 0: no cap but min_free_bytes
  // Space to leave free on the file system. Default: 1 % of its size, but at least the smaller of
  // 256 MiB and a tenth of its size.
  std::optional<std::uint64_t> min_free_bytes;
  // Without threads of its own the connector works in the caller's thread only; open() then reads
  // the whole directory.
  bool own_threads = true;
};

// Makes and locks the directory, or the first folder in a shared directory that no running server
// has locked. Sets `*paths`, `*min_free_bytes` and `*lock`. Returns an empty string, or a message
// that says what is wrong with the directory and what to do.
std::string claim_fs_directory(FileLayer& layer, const FsOptions& options,
                               const std::string& instance_id, FsPaths* paths,
                               std::uint64_t* min_free_bytes, std::unique_ptr<FileLock>* lock);

}  // namespace kvstrata
