// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/files.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "files/block.h"

namespace kvstrata {

namespace {

std::size_t shard_of(const Digest& key) noexcept {
  return std::size_t{key[0]} << 8 | key[1];
}

}  // namespace

LoadOutcome FsFiles::outcome_of(Read read) noexcept {
  switch (read) {
    case Read::kWhole:
      return {LoadStatus::kLoaded, Reason::kNone};
    case Read::kAbsent:
      return {LoadStatus::kAbsent, Reason::kNone};
    case Read::kTorn:
      return {LoadStatus::kCorrupt, Reason::kLength};
    case Read::kFailed:
      break;
  }
  return {LoadStatus::kFailed, Reason::kIo};
}

Status FsFiles::write_file(const NewPart& part) {
  std::unique_ptr<File> file;
  KVSTRATA_RETURN_IF_ERROR(opener_.open(part.path, FileMode::kCreate, &file));
  // Direct files take whole blocks: the last block is padded, then the file is truncated.
  const std::uint64_t tail = file->direct() ? part.length % kFileBlockBytes : 0;
  const std::uint64_t whole = part.length - tail;
  const WritePart blocks{part.bytes, whole};
  KVSTRATA_RETURN_IF_ERROR(file->write(std::span(&blocks, 1), 0));
  if (tail > 0) {
    FileBlock block;
    std::memcpy(block.bytes.data(), part.bytes + whole, tail);
    const WritePart last{block.bytes.data(), block.bytes.size()};
    KVSTRATA_RETURN_IF_ERROR(file->write(std::span(&last, 1), whole));
    KVSTRATA_RETURN_IF_ERROR(file->truncate(part.length));
  }
  return file->sync();
}

Status FsFiles::write_part(const NewPart& part, std::uint64_t need_bytes,
                           std::uint64_t min_free_bytes, std::uint64_t* missing_bytes) {
  *missing_bytes = need_bytes;
  FileSpace space;
  KVSTRATA_RETURN_IF_ERROR(layer_.space(paths_.base(), &space));
  if (space.free_bytes < need_bytes + min_free_bytes) {
    *missing_bytes = need_bytes + min_free_bytes - space.free_bytes;
    return Status(StatusCode::kNoSpace, Reason::kDiskFull,
                  "less than min_free_gb of the file system would stay free");
  }
  Status status = write_file(part);
  if (is_not_there(status)) {  // the directory was removed: make it again
    status = make_folders(layer_, paths_.tmp());
    if (status.ok()) status = write_file(part);
  }
  if (status.ok()) return status;
  if (!is_no_space(status))
    notes_.add(true, "cannot write " + describe_file_error(part.path, status));
  discard(part.path);
  return status;
}

Status FsFiles::make_folders_of(const Digest& key, std::vector<std::string>* made) {
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

Status FsFiles::rename_into_place(const Publication& item, std::vector<std::string>* made) {
  const std::string name = paths_.record(item.key);
  Status status = make_folders_of(item.key, made);
  if (status.ok()) status = layer_.rename(item.part, name);
  if (!is_not_there(status)) return status;
  {  // the directory was removed: make it again
    const std::lock_guard lock(known_mutex_);
    known_.reset();
    known_outer_.reset();
  }
  made->clear();
  KVSTRATA_RETURN_IF_ERROR(make_folders(layer_, paths_.base()));
  KVSTRATA_RETURN_IF_ERROR(make_folders_of(item.key, made));
  return layer_.rename(item.part, name);
}

void FsFiles::publish(std::span<Publication> items) {
  std::map<std::string, Sync> changed;
  const auto note_change = [&](const std::string& path, std::size_t item) {
    Sync& folder = changed[path];
    folder.path = path;
    folder.items.push_back(item);
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    Publication& item = items[i];
    std::vector<std::string> made;
    item.status = rename_into_place(item, &made);
    if (!item.status.ok()) {
      if (!is_no_space(item.status))
        notes_.add(true,
                   "cannot publish " + describe_file_error(paths_.record(item.key), item.status));
      const bool kept = item.keeps_part && is_no_space(item.status);
      if (!kept) discard(item.part);
      continue;
    }
    item.renamed = true;
    note_change(paths_.folder(item.key), i);
    for (const std::string& path : made)
      note_change(path.substr(0, path.rfind('/')), i);
  }
  std::vector<Sync> folders;
  folders.reserve(changed.size());
  for (auto& [path, folder] : changed)
    folders.push_back(std::move(folder));
  sync(folders);
  bool all_synced = true;
  for (const Sync& folder : folders) {
    if (folder.status.ok()) continue;
    all_synced = false;
    for (const std::size_t i : folder.items) {
      if (items[i].status.ok() && items[i].renamed) {
        discard(paths_.record(items[i].key));
        note_unlinked(items[i].key);
      }
      items[i].status = folder.status;
    }
  }
  if (!all_synced) return;
  const std::lock_guard lock(known_mutex_);
  for (const Publication& item : items) {
    if (!item.status.ok()) continue;
    known_.set(shard_of(item.key));
    known_outer_.set(item.key[0]);
  }
}

void FsFiles::sync(std::span<Sync> folders) {
  crew_.each(folders.size(),
             [&](std::size_t i) { folders[i].status = layer_.sync_folder(folders[i].path); });
  for (const Sync& folder : folders) {
    if (!folder.status.ok() && !is_no_space(folder.status))
      notes_.add(true, "cannot sync " + describe_file_error(folder.path, folder.status));
  }
}

void FsFiles::sync_folders(std::span<const std::string> paths) {
  std::vector<Sync> folders;
  folders.reserve(paths.size());
  for (const std::string& path : paths)
    folders.emplace_back().path = path;
  sync(folders);
}

FsFiles::Read FsFiles::read(LoadItem& item, const SeeFile& see) {
  const std::string path = paths_.record(item.key);
  std::unique_ptr<File> file;
  FileStat found;
  std::int64_t accessed_unix_ns = 0;
  Status status = opener_.open(path, FileMode::kRead, &file);
  if (status.ok()) status = file->stat(&found);
  if (status.ok()) {
    accessed_unix_ns = see(found);
    if (found.length > item.length) {
      notes_.add(
          true, path + " has " + std::to_string(found.length) + " bytes, too many, and is removed");
      return Read::kTorn;
    }
    const std::uint64_t length = found.length;
    item.length = static_cast<std::uint32_t>(length);
    const std::uint64_t tail = file->direct() ? length % kFileBlockBytes : 0;
    const ReadPart part{item.bytes, length - tail};
    status = file->read(std::span(&part, 1), 0);
    if (status.ok() && tail > 0) {  // direct files give whole blocks only
      std::unique_ptr<File> buffered;
      const ReadPart last{item.bytes + length - tail, tail};
      status = layer_.open(path, FileMode::kRead, false, &buffered);
      if (status.ok()) status = buffered->read(std::span(&last, 1), length - tail);
    }
  }
  if (is_not_there(status)) return Read::kAbsent;
  if (status.code() == StatusCode::kOutOfRange) return Read::kTorn;
  if (status.code() == StatusCode::kCorrupt) {  // not a regular file
    if (layer_.stat(path, &found).ok()) (void)see(found);
    notes_.add(true, path + " is not a regular file, and is removed");
    return Read::kTorn;
  }
  if (!status.ok()) {
    notes_.add(true, "cannot read " + describe_file_error(path, status));
    return Read::kFailed;
  }
  // The load is good even if the record's use cannot be recorded.
  if (accessed_unix_ns != 0) (void)file->set_access_time(accessed_unix_ns);
  return Read::kWhole;
}

void FsFiles::unlink(std::span<Removal> items, bool durable) {
  std::map<std::string, Sync> changed;
  for (std::size_t i = 0; i < items.size(); ++i) {
    Removal& item = items[i];
    const std::string path = paths_.record(item.key);
    Status status = layer_.unlink(path);
    if (!status.ok() && !is_not_there(status)) {
      // The file may be gone although the call failed, so stat() decides.
      notes_.add(true, "cannot remove " + describe_file_error(path, status));
      FileStat found;
      status = layer_.stat(path, &found);
      item.after = status.ok() ? After::kThere : After::kPerhapsThere;
      if (!is_not_there(status)) continue;
    }
    item.after = After::kGone;
    Sync& folder = changed[paths_.folder(item.key)];
    folder.path = paths_.folder(item.key);
    folder.items.push_back(i);
  }
  std::vector<Sync> folders;
  folders.reserve(changed.size());
  for (auto& [path, folder] : changed)
    folders.push_back(std::move(folder));
  if (durable) sync(folders);
  for (const Sync& folder : folders) {
    // If the directory was removed too, there is nothing to sync.
    const bool synced = durable && (folder.status.ok() || is_not_there(folder.status));
    if (!synced) note_unlinked(items[folder.items[0]].key);
    for (const std::size_t i : folder.items)
      items[i].after = synced ? After::kGoneForGood : After::kGone;
  }
}

void FsFiles::note_unlinked(const Digest& key) {
  const std::lock_guard lock(unlinked_mutex_);
  unlinked_.set(shard_of(key));
}

void FsFiles::sync_unlinked() {
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

void FsFiles::discard(const std::string& path) {
  const Status status = layer_.unlink(path);
  if (!status.ok() && !is_not_there(status))
    notes_.add(true, "cannot remove " + describe_file_error(path, status));
}

}  // namespace kvstrata
