// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/durable_folders.h"

#include <cerrno>

namespace kvstrata {

namespace {

std::size_t shard_of(const Digest& key) noexcept {
  return std::size_t{key[0]} << 8 | key[1];
}

}  // namespace

void FsDurableFolders::sync(std::span<Sync> folders) {
  crew_.each(folders.size(),
             [&](std::size_t i) { folders[i].status = layer_.sync_folder(folders[i].path); });
  for (const Sync& folder : folders) {
    if (!folder.status.ok() && !is_no_space(folder.status))
      notes_.add(true, "cannot sync " + describe_file_error(folder.path, folder.status));
  }
}

Status FsDurableFolders::make(const Digest& key, std::vector<std::string>* made) {
  bool known = false;
  bool known_outer = false;
  {
    const std::lock_guard lock(known_mutex_);
    known = known_[shard_of(key)];
    known_outer = known_outer_[key[0]];
  }
  if (!known_outer) made->push_back(paths_.outer_folder(key));
  if (!known) made->push_back(paths_.folder(key));
  for (const std::string& path : *made) {
    const Status status = layer_.make_folder(path);
    if (status.ok()) continue;
    if (!is_os_error(status, EEXIST)) return status;
    FileStat found;
    KVSTRATA_RETURN_IF_ERROR(layer_.stat(path, &found));
    // Through a link, puts would write outside the directory.
    if (!found.is_folder) return Status(StatusCode::kOsError, "stat", ENOTDIR);
  }
  return Status();
}

void FsDurableFolders::know(const Digest& key) {
  const std::lock_guard lock(known_mutex_);
  known_.set(shard_of(key));
  known_outer_.set(key[0]);
}

void FsDurableFolders::forget_known() {
  const std::lock_guard lock(known_mutex_);
  known_.reset();
  known_outer_.reset();
}

void FsDurableFolders::note_unlinked(const Digest& key) {
  const std::lock_guard lock(unlinked_mutex_);
  unlinked_.set(shard_of(key));
}

void FsDurableFolders::sync_unlinked() {
  std::vector<Digest> keys;  // one of each directory
  std::vector<Sync> folders;
  {
    const std::lock_guard lock(unlinked_mutex_);
    for (std::size_t shard = 0; shard < unlinked_.size(); ++shard) {
      if (!unlinked_[shard]) continue;
      Digest& key = keys.emplace_back();
      key[0] = static_cast<unsigned char>(shard >> 8);
      key[1] = static_cast<unsigned char>(shard & 255);
      folders.emplace_back().path = paths_.folder(key);
    }
    unlinked_.reset();
  }
  sync(folders);
  for (std::size_t i = 0; i < folders.size(); ++i) {
    if (!folders[i].status.ok() && !is_not_there(folders[i].status)) note_unlinked(keys[i]);
  }
}

}  // namespace kvstrata
