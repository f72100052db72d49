// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Functions that work on any file layer.
#include "files/files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "files/notes.h"

namespace kvstrata {

bool is_os_error(const Status& status, int error) noexcept {
  return status.code() == StatusCode::kOsError && status.detail(0) == static_cast<unsigned>(error);
}

bool is_no_space(const Status& status) noexcept {
  return status.reason() == Reason::kDiskFull || is_os_error(status, ENOSPC) ||
         is_os_error(status, EDQUOT);
}

bool is_not_there(const Status& status) noexcept {
  return is_os_error(status, ENOENT) || is_os_error(status, ESTALE);
}

const char* stops_start(const Status& status) {
  const bool is_wrong = status.code() == StatusCode::kOsError &&
                        (status.detail(0) == ENOTDIR || status.detail(0) == ELOOP ||
                         status.detail(0) == ENAMETOOLONG);
  return is_wrong ? "!" : "";
}

std::string describe_file_error(const std::string& path, const Status& status) {
  if (status.code() != StatusCode::kOsError) return path + ": " + status.message();
  return path + ": " + ::strerror(static_cast<int>(status.detail(0)));
}

Status FileOpener::open(const std::string& path, FileMode mode, std::unique_ptr<File>* out) {
  if (direct_.load(std::memory_order_relaxed)) {
    const Status status = files_.open(path, mode, true, out);
    if (status.code() != StatusCode::kUnsupported) return status;
    if (direct_.exchange(false))
      notes_.add(true,
                 "use_odirect has no effect: the file system of " + path + " has no direct files");
  }
  return files_.open(path, mode, false, out);
}

Status File::length(std::uint64_t* out) noexcept {
  FileStat found;
  KVSTRATA_RETURN_IF_ERROR(stat(&found));
  *out = found.length;
  return Status();
}

Status folder_stat(FileLayer& files, const std::string& path, FileStat* out) {
  KVSTRATA_RETURN_IF_ERROR(files.stat(path, out));
  if (out->is_folder) return Status();
  if (out->is_file) return Status(StatusCode::kOsError, "stat", ENOTDIR);
  return files.stat(path + "/.", out);  // the path is a symbolic link, which this follows
}

// If a folder existed, EACCES, EPERM, EROFS and EINVAL from the sync of its parent are ignored: a
// process that may not write to the parent did not create the folder, and a file system that cannot
// sync folders cannot promise that their names survive a crash.
Status make_folders(FileLayer& files, const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    FileStat found;
    Status status = folder_stat(files, folder, &found);
    const bool missing = is_os_error(status, ENOENT);
    if (missing) {
      status = files.make_folder(folder);
      if (is_os_error(status, EEXIST)) status = folder_stat(files, folder, &found);
    }
    KVSTRATA_RETURN_IF_ERROR(status);
    status = files.sync_folder(folder.substr(0, std::max<std::size_t>(folder.rfind('/'), 1)));
    const bool cannot = is_os_error(status, EACCES) || is_os_error(status, EPERM) ||
                        is_os_error(status, EROFS) || is_os_error(status, EINVAL);
    if (!status.ok() && (missing || !cannot)) return status;
    if (end == std::string::npos) return Status();
  }
}

}  // namespace kvstrata
