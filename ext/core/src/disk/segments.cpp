// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/segments.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace kvstrata::disk {

namespace {

constexpr std::size_t kSegmentsWithReserve = 4;

enum class List : std::uint8_t { kNone, kFree, kActive, kFull };

List list_of(SegmentState state) noexcept {
  switch (state) {
    case SegmentState::kFree:
      return List::kFree;
    case SegmentState::kActive:
      return List::kActive;
    case SegmentState::kFull:
    case SegmentState::kListed:
    case SegmentState::kRetiring:
      return List::kFull;
    case SegmentState::kAbsent:
    case SegmentState::kDrained:
      break;
  }
  return List::kNone;
}

// See Segments::move.
bool may_follow(SegmentState from, SegmentState to) noexcept {
  using enum SegmentState;
  switch (from) {
    case kAbsent:
      return to == kFree;
    case kFree:
      return to == kActive || to == kDrained;
    case kActive:
      return to == kFull;
    case kFull:
      return to == kListed || to == kRetiring;
    case kListed:
      return to == kRetiring;
    case kRetiring:
      return to == kRetiring || to == kDrained;
    case kDrained:
      return to == kFree || to == kRetiring || to == kAbsent;
  }
  return false;
}

}  // namespace

FramePlace frame_place(const Digest& key, std::uint32_t block) noexcept {
  FramePlace place{.hash_low = 0, .hash_high = 0, .block = block};
  std::memcpy(&place.hash_low, key.data(), 4);
  std::memcpy(&place.hash_high, key.data() + 4, 4);
  return place;
}

Segment* Segments::find(std::uint32_t number) noexcept {
  const auto found = segments_.find(number);
  return found == segments_.end() ? nullptr : found->second.get();
}

std::size_t Segments::reserved() const noexcept {
  return full_.size() + free_.size() >= kSegmentsWithReserve ? 1 : 0;
}

void Segments::move(Segment& segment, SegmentState to) noexcept {
  assert(may_follow(segment.state, to));
  assert(to != SegmentState::kDrained || segment.pins == 0);
  const List before = list_of(segment.state);
  segment.state = to;
  const List after = list_of(segment.state);
  if (before == after) return;
  if (before == List::kFree) std::erase(free_, segment.number);
  if (before == List::kFull) std::erase(full_, segment.number);
  if (before == List::kActive) active_ = nullptr;
  if (after == List::kFree) free_.push_back(segment.number);
  if (after == List::kActive) active_ = &segment;
  if (after == List::kFull) {
    if (before == List::kActive)
      full_.push_back(segment.number);
    else
      full_.push_front(segment.number);  // it was the oldest before it was drained
  }
}

void Segments::unpin(Segment& segment) noexcept {
  if (--segment.pins == 0) shared_.changed.notify_all();
}

Segment& Segments::adopt(std::unique_ptr<Segment> segment) {
  total_bytes_ += segment->length;
  const std::uint32_t number = segment->number;
  return *(segments_[number] = std::move(segment));
}

void Segments::adopt_foreign(std::uint32_t number, std::uint64_t length_bytes) noexcept {
  total_bytes_ += length_bytes;
  foreign_.insert(number);
}

void Segments::clear() noexcept {
  segments_.clear();
  full_.clear();
  free_.clear();
  active_ = nullptr;
}

// The lowest number that no file in the folder has.
std::uint32_t Segments::unused_number() const noexcept {
  std::uint32_t number = 0;
  while (segments_.contains(number) || foreign_.contains(number))
    ++number;
  return number;
}

Status Segments::create(Lock& lock, std::uint64_t synced) noexcept {
  auto segment = std::make_unique<Segment>();
  segment->number = unused_number();
  segment->length = shared_.options.segment_bytes;
  char name[16];
  std::snprintf(name, sizeof(name), "/%08x.seg", segment->number);
  segment->path = shared_.options.folder + name;
  const SegmentHeader header{.segment = segment->number,
                             .generation = segment->generation,
                             .length = segment->length,
                             .synced = synced};
  lock.unlock();
  FileSpace space;
  Status status = shared_.files.space(shared_.options.folder, &space);
  if (status.ok() && space.free_bytes < shared_.options.min_free_bytes + segment->length)
    status = Status(StatusCode::kNoSpace, Reason::kDiskFull,
                    "less than min_free_gb of the file system would stay free");
  if (status.ok()) {
    std::unique_ptr<File> file;
    status = shared_.opener.open(segment->path, FileMode::kCreate, &file);
    segment->file = std::move(file);
    FileBlock block;
    encode(header, &block);
    const WritePart parts[] = {{block.bytes.data(), kFileBlockBytes}};
    // The header is synced with the first frame behind it.
    if (status.ok()) status = segment->file->allocate(segment->length);
    if (status.ok()) status = segment->file->write(parts, 0);
    if (status.ok()) status = shared_.files.sync_folder(shared_.options.folder);
  }
  const bool made = segment->file != nullptr;
  const bool left = !status.ok() && made && !shared_.files.unlink(segment->path).ok();
  lock.lock();
  // A file that could not be removed, or that another program made after the log was opened.
  if (left || is_os_error(status, EEXIST))
    adopt_foreign(segment->number, made ? segment->length : 0);
  if (!status.ok()) return status;
  shared_.counts.written_bytes += kSegmentHeaderBytes;
  segment->dirty = true;
  move(adopt(std::move(segment)), SegmentState::kFree);
  return Status();
}

Status Segments::renew(Lock& lock, Segment& segment, std::uint64_t synced) noexcept {
  const SegmentHeader header{.segment = segment.number,
                             .generation = segment.generation + 1,
                             .length = segment.length,
                             .synced = synced};
  const std::shared_ptr<File> file = segment.file;
  lock.unlock();
  FileBlock block;
  encode(header, &block);
  const WritePart parts[] = {{block.bytes.data(), kFileBlockBytes}};
  Status status = file->write(parts, 0);
  if (status.ok()) status = file->sync();
  lock.lock();
  if (!status.ok()) {
    move(segment, SegmentState::kRetiring);
    return status;
  }
  shared_.counts.written_bytes += kSegmentHeaderBytes;
  ++shared_.counts.syncs;
  segment.generation = header.generation;
  segment.end = kSegmentHeaderBytes;
  segment.last = FrameName{};
  segment.table.clear();
  segment.table_failed = false;
  move(segment, SegmentState::kFree);
  return Status();
}

Status Segments::drop(Lock& lock, Segment& segment) noexcept {
  move(segment, SegmentState::kAbsent);
  const std::unique_ptr<Segment> gone = std::move(segments_.at(segment.number));
  segments_.erase(gone->number);
  foreign_.insert(gone->number);
  lock.unlock();
  Status status = shared_.files.unlink(gone->path);
  if (is_os_error(status, ENOENT)) status = Status();
  // A tombstone must outlive the record that it removes. The files are removed in the order in
  // which they were filled, so each removal is made durable before the next one. (A file without
  // frames may come back.)
  if (status.ok() && gone->has_frames()) status = shared_.files.sync_folder(shared_.options.folder);
  lock.lock();
  KVSTRATA_RETURN_IF_ERROR(status);
  foreign_.erase(gone->number);
  total_bytes_ -= gone->length;
  return Status();
}

}  // namespace kvstrata::disk
