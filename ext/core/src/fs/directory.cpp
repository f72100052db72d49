// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/directory.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <utility>

namespace kvstrata {

namespace {

// Makes the directory and its directory for parts, and sets `*min_free_bytes`. Returns an empty
// string, or what is wrong.
std::string prepare(FileLayer& layer, const FsPaths& paths, const FsOptions& options,
                    std::uint64_t* min_free_bytes) {
  const auto unusable = [&](const std::string& path, const Status& status) {
    return stops_start(status) + ("base_path: '" + paths.base()) +
           "' cannot be used: " + describe_file_error(path, status) +
           "; give a directory that this user may write and lock";
  };
  Status status = make_folders(layer, paths.tmp());
  if (!status.ok()) return unusable(paths.tmp(), status);
  FileStat tmp;
  FileStat base;
  status = folder_stat(layer, paths.tmp(), &tmp);
  if (!status.ok()) return unusable(paths.tmp(), status);
  status = folder_stat(layer, paths.base(), &base);
  if (!status.ok()) return unusable(paths.base(), status);
  if (tmp.device != base.device)
    return "!relative_tmp_dir: '" + options.relative_tmp_dir +
           "' is on another file system than base_path, so files cannot be published by a rename;"
           " choose a directory on the same file system";
  FileSpace space;
  status = layer.space(paths.base(), &space);
  if (!status.ok()) return unusable(paths.base(), status);
  *min_free_bytes = options.min_free_bytes.value_or(std::max(
      space.total_bytes / 100, std::min<std::uint64_t>(256 << 20, space.total_bytes / 10)));
  return "";
}

}  // namespace

std::string claim_fs_directory(FileLayer& layer, const FsOptions& options,
                               const std::string& instance_id, FsPaths* paths,
                               std::uint64_t* min_free_bytes, std::unique_ptr<FileLock>* lock) {
  std::string holder;
  for (int number = 0; number < (options.shared ? kMaxFsServers : 1); ++number) {
    std::string folder = options.base_path;
    if (options.shared) folder.append("/").append(fs_server_folder(number));
    *paths = FsPaths(std::move(folder), options.relative_tmp_dir);
    std::string wrong = prepare(layer, *paths, options, min_free_bytes);
    if (!wrong.empty()) return wrong;
    const Status status = layer.lock(paths->lock(), lock, &holder);
    if (status.ok()) {
      (*lock)->note("pid " + std::to_string(::getpid()) + ", instance " + instance_id + "\n");
      return "";
    }
    if (status.code() != StatusCode::kBusy)
      return "base_path: '" + paths->base() +
             "' cannot be locked: " + describe_file_error(paths->lock(), status) +
             "; give a directory that this user may write and lock";
  }
  if (options.shared)
    return "base_path: '" + options.base_path + "' is shared by " + std::to_string(kMaxFsServers) +
           " running servers, the maximum; give this one another directory";
  while (!holder.empty() && std::isspace(static_cast<unsigned char>(holder.back())))
    holder.pop_back();
  return "base_path: '" + paths->base() + "' belongs to another running server (" +
         (holder.empty() ? "unknown" : holder) +
         "); give each server a directory of its own, or set \"shared\": true for all of them";
}

}  // namespace kvstrata
