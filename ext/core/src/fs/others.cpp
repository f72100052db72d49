// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/others.h"

#include <algorithm>

namespace kvstrata {

namespace {

// Identifies a copy of a record by its file. The highest bit is set, which no copy in an index has.
std::uint64_t copy_of(const FileStat& found) noexcept {
  return (found.inode * 0x9E3779B97F4A7C15ULL ^
          static_cast<std::uint64_t>(found.modified_unix_ns)) |
         std::uint64_t{1} << 63;
}

bool is_record(const FileStat& found) noexcept {
  return found.is_file && found.length >= kMinRecordBytes && found.length <= UINT32_MAX;
}

}  // namespace

FsOthers::Folders FsOthers::folders() {
  const std::lock_guard lock(mutex_);
  return folders_;
}

// Adds the folders of servers that have come since. A folder is kept when it is removed.
void FsOthers::list() {
  std::vector<FolderEntry> entries;
  const Status status = layer_.list(options_.base_path, &entries);
  if (!status.ok())
    notes_.add(true, "cannot list " + describe_file_error(options_.base_path, status));
  const std::lock_guard lock(mutex_);
  for (const FolderEntry& entry : entries) {
    const std::string base = options_.base_path + "/" + entry.name;
    if (!entry.is_folder || fs_server_number(entry.name) < 0 || base == own_.base()) continue;
    const bool known = std::ranges::any_of(
        folders_, [&](const auto& folder) { return folder->paths.base() == base; });
    if (!known) folders_.push_back(std::make_shared<Folder>(layer_, options_, base, notes_));
  }
}

void FsOthers::find(std::span<ExistsItem> items) {
  const auto absent = [](const ExistsItem& item) { return item.presence == Presence::kAbsent; };
  if (std::ranges::none_of(items, absent)) return;
  list();
  const Folders all = folders();
  for (ExistsItem& item : items) {
    if (absent(item)) find(all, item);
  }
}

void FsOthers::find(const Folders& folders, ExistsItem& item) {
  for (const auto& folder : folders) {
    FileStat found;
    const std::string path = folder->paths.record(item.key);
    const Status status = layer_.stat(path, &found);
    if (status.ok() && is_record(found)) {
      item.presence = Presence::kPresent;
      return;
    }
    if (status.ok() || is_not_there(status)) continue;
    item.presence = Presence::kUnknown;
    item.reason = word_of(Reason::kIo);
    notes_.add(true, "cannot look for " + describe_file_error(path, status));
  }
}

LoadOutcome FsOthers::load(LoadItem& item) {
  for (const auto& folder : folders()) {
    const auto read = folder->files.read(item, [&](const FileStat& found) -> std::int64_t {
      item.copy = copy_of(found);
      return 0;
    });
    if (read != FsFiles::Read::kAbsent) return FsFiles::outcome_of(read);
  }
  return {LoadStatus::kAbsent, Reason::kNone};
}

void FsOthers::remove_corrupt(const LoadItem& item) {
  for (const auto& folder : folders()) {
    const std::string path = folder->paths.record(item.key);
    FileStat found;
    if (!layer_.stat(path, &found).ok() || copy_of(found) != item.copy) continue;
    notes_.add(true, path + " is corrupt and is removed");
    FsFiles::Removal removal{.key = item.key};
    folder->files.unlink(std::span(&removal, 1), false);
  }
}

}  // namespace kvstrata
