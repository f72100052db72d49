// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/fs_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "kvstrata/record.h"

namespace kvstrata {

namespace {

struct alignas(kFileBlockBytes) Page {
  std::array<std::uint8_t, kFileBlockBytes> bytes{};
};

std::size_t shard_of(const Digest& key) noexcept {
  return std::size_t{key[0]} << 8 | key[1];
}

}  // namespace

void NoteBook::add(bool warning, std::string text) {
  const std::lock_guard lock(mutex_);
  if (notes_.size() < kLimit)
    notes_.push_back({warning, std::move(text)});
  else
    dropped_ += 1;
}

void NoteBook::take(std::vector<ConnectorNote>* out) {
  const std::lock_guard lock(mutex_);
  out->insert(out->end(), std::make_move_iterator(notes_.begin()),
              std::make_move_iterator(notes_.end()));
  notes_.clear();
  if (dropped_ > 0) out->push_back({true, std::to_string(dropped_) + " more of these"});
  dropped_ = 0;
}

bool is_no_space(const Status& status) noexcept {
  return is_os_error(status, ENOSPC) || is_os_error(status, EDQUOT);
}

bool is_not_there(const Status& status) noexcept {
  return is_os_error(status, ENOENT) || is_os_error(status, ESTALE);
}

FsPutOutcome fs_put_failure(const Status& status) noexcept {
  if (is_no_space(status)) return {PutStatus::kThrottled, "disk_full"};
  return {PutStatus::kFailed, "io"};
}

FsLoadOutcome FsFiles::outcome_of(Read read) noexcept {
  switch (read) {
    case Read::kWhole:
      return {LoadStatus::kLoaded, ""};
    case Read::kAbsent:
      return {LoadStatus::kAbsent, ""};
    case Read::kOtherLength:
      return {LoadStatus::kFailed, "length"};
    case Read::kTorn:
      return {LoadStatus::kCorrupt, "length"};
    case Read::kFailed:
      break;
  }
  return {LoadStatus::kFailed, "io"};
}

// Direct where this file system has it, if that is wanted.
Status FsFiles::open_at_best(const std::string& path, FileMode mode, std::unique_ptr<File>* out) {
  if (direct_.load(std::memory_order_relaxed)) {
    const Status status = layer_.open(path, mode, true, out);
    if (status.code() != StatusCode::kUnsupported) return status;
    if (direct_.exchange(false))
      notes_.add(true,
                 "use_odirect has no effect: the file system of " + paths_.base() + " cannot");
  }
  return layer_.open(path, mode, false, out);
}

Status FsFiles::write_file(const std::string& path, const std::uint8_t* bytes, std::uint64_t length,
                           std::int64_t accessed_unix_ns) {
  std::unique_ptr<File> file;
  KVSTRATA_RETURN_IF_ERROR(open_at_best(path, FileMode::kCreate, &file));
  // Direct files take whole blocks: the last one is padded, then the file is cut.
  const std::uint64_t tail = file->direct() ? length % kFileBlockBytes : 0;
  const std::uint64_t whole = length - tail;
  const WritePart part{bytes, whole};
  KVSTRATA_RETURN_IF_ERROR(file->write(std::span(&part, 1), 0));
  if (tail > 0) {
    Page page;
    std::memcpy(page.bytes.data(), bytes + whole, tail);
    const WritePart last{page.bytes.data(), page.bytes.size()};
    KVSTRATA_RETURN_IF_ERROR(file->write(std::span(&last, 1), whole));
    KVSTRATA_RETURN_IF_ERROR(file->truncate(length));
  }
  if (accessed_unix_ns != 0) (void)file->set_access_time(accessed_unix_ns);
  return file->sync();
}

Status FsFiles::write_part(const std::string& path, const std::uint8_t* bytes, std::uint64_t length,
                           std::int64_t accessed_unix_ns) {
  Status status = write_file(path, bytes, length, accessed_unix_ns);
  if (is_not_there(status)) {  // somebody removed the directory: make it again
    status = make_folders(layer_, paths_.tmp());
    if (status.ok()) status = write_file(path, bytes, length, accessed_unix_ns);
  }
  if (status.ok()) return status;
  if (!is_no_space(status)) notes_.add(true, "cannot write " + describe_file_error(path, status));
  discard(path);
  return status;
}

// A directory that is there but not known was perhaps made by a server that did not live to sync
// it. `made` gets those whose own entries are to be synced.
Status FsFiles::make_shard(const Digest& key, std::vector<std::string>* made) {
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
    if (!status.ok() && !is_os_error(status, EEXIST)) return status;
  }
  return Status();
}

Status FsFiles::rename_into_place(const Publication& item, std::vector<std::string>* made) {
  const std::string name = paths_.record(item.key);
  Status status = make_shard(item.key, made);
  if (item.part.empty()) return status;
  if (status.ok()) status = layer_.rename(item.part, name);
  if (!is_not_there(status)) return status;
  {  // somebody removed the directory: make it again
    const std::lock_guard lock(known_mutex_);
    known_.reset();
    known_outer_.reset();
  }
  made->clear();
  KVSTRATA_RETURN_IF_ERROR(make_folders(layer_, paths_.base()));
  KVSTRATA_RETURN_IF_ERROR(make_shard(item.key, made));
  return layer_.rename(item.part, name);
}

void FsFiles::publish(std::span<Publication> items) {
  std::map<std::string, Folder> changed;
  const auto note_change = [&](const std::string& path, std::size_t item) {
    Folder& folder = changed[path];
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
      if (!item.part.empty()) discard(item.part);
      continue;
    }
    item.renamed = !item.part.empty();
    note_change(paths_.folder(item.key), i);
    for (const std::string& path : made)
      note_change(path.substr(0, path.rfind('/')), i);
  }
  std::vector<Folder> folders;
  folders.reserve(changed.size());
  for (auto& [path, folder] : changed)
    folders.push_back(std::move(folder));
  sync_all(folders);
  bool all_synced = true;
  for (const Folder& folder : folders) {
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

void FsFiles::sync_folders(std::span<const std::string> paths) {
  std::vector<Folder> folders;
  folders.reserve(paths.size());
  for (const std::string& path : paths)
    folders.emplace_back().path = path;
  sync_all(folders);
}

void FsFiles::sync_all(std::vector<Folder>& folders) {
  crew_.each(folders.size(),
             [&](std::size_t i) { folders[i].status = layer_.sync_folder(folders[i].path); });
  for (const Folder& folder : folders) {
    if (!folder.status.ok() && !is_no_space(folder.status))
      notes_.add(true, "cannot sync " + describe_file_error(folder.path, folder.status));
  }
}

FsFiles::Read FsFiles::read(const Digest& key, std::uint8_t* bytes, std::uint64_t length,
                            const SeeFile& see) {
  const std::string path = paths_.record(key);
  std::unique_ptr<File> file;
  FileStat found;
  std::int64_t accessed_unix_ns = 0;
  Status status = open_at_best(path, FileMode::kRead, &file);
  if (status.ok()) status = file->stat(&found);
  if (status.ok()) {
    accessed_unix_ns = see(found);
    if (found.length != length) return read_other_length(path, key, found.length, length);
    const std::uint64_t tail = file->direct() ? length % kFileBlockBytes : 0;
    const ReadPart part{bytes, length - tail};
    status = file->read(std::span(&part, 1), 0);
    if (status.ok() && tail > 0) {  // direct files give whole blocks only
      std::unique_ptr<File> buffered;
      const ReadPart last{bytes + length - tail, tail};
      status = layer_.open(path, FileMode::kRead, false, &buffered);
      if (status.ok()) status = buffered->read(std::span(&last, 1), length - tail);
    }
  }
  if (is_not_there(status)) return Read::kAbsent;
  if (status.code() == StatusCode::kOutOfRange) return Read::kTorn;
  if (!status.ok()) {
    notes_.add(true, "cannot read " + describe_file_error(path, status));
    return Read::kFailed;
  }
  // Where the medium cannot remember that the record was used, the record is as good.
  if (accessed_unix_ns != 0) (void)file->set_access_time(accessed_unix_ns);
  return Read::kWhole;
}

// A whole record of another length than asked for is the caller's mistake, else it is torn.
FsFiles::Read FsFiles::read_other_length(const std::string& path, const Digest& key,
                                         std::uint64_t found, std::uint64_t asked) {
  const std::string lengths = path + " has " + std::to_string(found) + " bytes";
  if (found >= kOuterHeaderBytes) {
    std::array<std::uint8_t, kOuterHeaderBytes> header;
    std::unique_ptr<File> file;
    const ReadPart part{header.data(), header.size()};
    Status status = layer_.open(path, FileMode::kRead, false, &file);
    if (is_not_there(status)) return Read::kAbsent;
    if (status.ok()) status = file->read(std::span(&part, 1), 0);
    if (!status.ok() && status.code() != StatusCode::kOutOfRange) {
      notes_.add(true, "cannot read " + describe_file_error(path, status));
      return Read::kFailed;
    }
    Digest stored{};
    std::uint64_t record_bytes = 0;
    if (status.ok()) status = read_outer_header(header.data(), &stored, &record_bytes);
    if (status.ok() && stored == key && record_bytes == found) {
      notes_.add(true, lengths + ", asked for " + std::to_string(asked));
      return Read::kOtherLength;
    }
  }
  notes_.add(true, lengths + ", it is cut or torn and is removed");
  return Read::kTorn;
}

void FsFiles::read_head(HeadItem& item) {
  std::unique_ptr<File> file;
  const ReadPart part{item.bytes, kHeadBytes};
  if (layer_.open(paths_.record(item.key), FileMode::kRead, false, &file).ok() &&
      file->read(std::span(&part, 1), 0).ok())
    item.length = kHeadBytes;
}

void FsFiles::unlink(std::span<Removal> items, bool durable) {
  std::map<std::string, Folder> changed;
  for (std::size_t i = 0; i < items.size(); ++i) {
    Removal& item = items[i];
    const std::string path = paths_.record(item.key);
    Status status = layer_.unlink(path);
    if (!status.ok() && !is_not_there(status)) {
      // A failed call may have done it.
      notes_.add(true, "cannot remove " + describe_file_error(path, status));
      FileStat found;
      status = layer_.stat(path, &found);
      item.after = status.ok() ? After::kThere : After::kPerhapsThere;
      if (!is_not_there(status)) continue;
    }
    item.after = After::kGone;
    Folder& folder = changed[paths_.folder(item.key)];
    folder.path = paths_.folder(item.key);
    folder.items.push_back(i);
  }
  std::vector<Folder> folders;
  folders.reserve(changed.size());
  for (auto& [path, folder] : changed)
    folders.push_back(std::move(folder));
  if (durable) sync_all(folders);
  for (const Folder& folder : folders) {
    // Where somebody removed the directory too, there is nothing to sync.
    const bool synced = durable && (folder.status.ok() || is_not_there(folder.status));
    if (!synced) note_unlinked(items[folder.items[0]].key);
    for (const std::size_t i : folder.items)
      items[i].after = synced ? After::kGoneForGood : After::kGone;
  }
}

// After the unlink: who syncs before that does not forget it.
void FsFiles::note_unlinked(const Digest& key) {
  const std::lock_guard lock(unlinked_mutex_);
  unlinked_.set(shard_of(key));
}

void FsFiles::sync_unlinked() {
  std::vector<Digest> keys;  // one of each directory
  std::vector<Folder> folders;
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
  sync_all(folders);
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
