// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/directory.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>

namespace kvstrata {

std::string prepare_fs_directory(FileLayer& layer, const FsPaths& paths, const FsOptions& options,
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

std::string fs_holder_note(const std::string& instance_id) {
  return "pid " + std::to_string(::getpid()) + ", instance " + instance_id + "\n";
}

std::string lock_fs_directory(FileLayer& layer, const FsPaths& paths, bool shared,
                              const std::string& instance_id, std::unique_ptr<FileLock>* out) {
  std::string holder;
  const Status status = layer.lock_folder(paths.lock(), shared, out, &holder);
  if (status.code() == StatusCode::kBusy) {
    while (!holder.empty() && std::isspace(static_cast<unsigned char>(holder.back())))
      holder.pop_back();
    return "base_path: '" + paths.base() + "' belongs to another running server (" +
           (holder.empty() ? "unknown" : holder) + (shared ? ") that does not share it" : ")") +
           "; give each server a directory of its own, or set \"shared\": true for all of them";
  }
  if (!status.ok())
    return "base_path: '" + paths.base() +
           "' cannot be locked: " + describe_file_error(paths.lock(), status) +
           "; give a directory that this user may write and lock";
  (*out)->note(fs_holder_note(instance_id));
  return "";
}

}  // namespace kvstrata
