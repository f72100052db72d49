// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/snapshot.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvstrata {

namespace {

// Reads all of [offset, offset + bytes). kCorrupt: the file ends earlier.
Status read_whole(int fd, std::uint64_t offset, void* target, std::uint64_t bytes) noexcept {
  auto* at = static_cast<std::uint8_t*>(target);
  while (bytes > 0) {
    const ssize_t got = pread(fd, at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Status(StatusCode::kOsError, "reading the index file failed", errno);
    if (got == 0) return Status(StatusCode::kCorrupt, "the index file became shorter meanwhile");
    at += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
  return Status();
}

}  // namespace

Status IndexSnapshot::open(int index_fd, IndexSnapshot* out, FormatMismatch* mismatch) {
  struct stat info{};
  if (fstat(index_fd, &info) != 0)
    return Status(StatusCode::kOsError, "fstat of the index file failed", errno);
  const auto bytes = static_cast<std::uint64_t>(info.st_size);
  const std::uint64_t smallest = IndexLayout::of(kMinEntryCapacity).file_bytes;
  if (bytes < smallest) {
    *mismatch = {"index_file_bytes", bytes, smallest};
    return Status(StatusCode::kIncompatible, "index_file_bytes");
  }
  IndexSnapshot snapshot;
  snapshot.head_.resize(1);
  KVSTRATA_RETURN_IF_ERROR(read_whole(index_fd, 0, snapshot.head_.data(), sizeof(Head)));
  KVSTRATA_RETURN_IF_ERROR(
      IndexView::check(snapshot.head_.data(), bytes, &snapshot.layout_, mismatch));
  *out = std::move(snapshot);
  return Status();
}

std::uint32_t IndexSnapshot::entries_touched() const noexcept {
  return static_cast<std::uint32_t>(std::min(header().entries_touched, layout_.entry_capacity));
}

std::vector<IndexSnapshot::Run> IndexSnapshot::runs() const {
  const IndexHeader& header = this->header();
  const std::uint32_t slab_count = stored_slab_count(header.extents_bytes, header.slab_bytes);
  std::vector<Run> found;
  for (std::uint32_t slab = 0; slab < slab_count;) {
    const StoredRun run = stored_run(header.slab_table, slab, slab_count);
    if (run.slabs != 0) found.push_back({slab, run.slabs, run.extent_bytes});
    slab += std::max(run.slabs, 1u);
  }
  return found;
}

Status IndexSnapshot::read(int index_fd, std::uint32_t first, std::vector<Entry>* entries,
                           std::uint32_t* next) const {
  *next = 0;
  const std::uint32_t touched = entries_touched();
  if (first >= touched) return Status();
  const std::uint32_t count = std::min(kMostEntries, touched - first);
  std::vector<HotEntry> hot(count);
  std::vector<ColdEntry> cold(count);
  std::vector<HotEntry> again(count);
  const std::uint64_t hot_at = layout_.hot_offset + std::uint64_t{first} * sizeof(HotEntry);
  const std::uint64_t cold_at = layout_.cold_offset + std::uint64_t{first} * sizeof(ColdEntry);
  KVSTRATA_RETURN_IF_ERROR(read_whole(index_fd, hot_at, hot.data(), count * sizeof(HotEntry)));
  KVSTRATA_RETURN_IF_ERROR(read_whole(index_fd, cold_at, cold.data(), count * sizeof(ColdEntry)));
  KVSTRATA_RETURN_IF_ERROR(read_whole(index_fd, hot_at, again.data(), count * sizeof(HotEntry)));
  // A view whose entries are these alone; header, rows and buckets are not looked at.
  IndexLayout layout;
  layout.entry_capacity = count;
  const IndexView view(hot.data(), layout);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (view.state_byte(i) == static_cast<std::uint8_t>(EntryState::kFree)) continue;
    Entry entry;
    entry.number = first + i;
    entry.state = view.state_byte(i);
    entry.changing =
        (hot[i].word[0] & 1) != 0 || std::memcmp(&hot[i], &again[i], sizeof(HotEntry)) != 0;
    entry.key = view.key(i);
    entry.offset = view.offset(i);
    entry.length = view.length(i);
    entry.generation = view.generation(i);
    entry.parent = view.parent(i);
    std::copy(std::begin(cold[i].rows), std::end(cold[i].rows), entry.rows);
    std::memcpy(entry.identity, cold[i].identity, sizeof entry.identity);
    entry.owner = cold[i].owner;
    entry.tenant = cold[i].tenant;
    entries->push_back(entry);
  }
  if (first + count < touched) *next = first + count;
  return Status();
}

}  // namespace kvstrata
