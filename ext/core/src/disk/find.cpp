// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/find.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "files/outcome.h"
#include "record/record.h"

namespace kvstrata::disk {

void Finder::exists(std::span<ExistsItem> items) noexcept {
  for (ExistsItem& item : items)
    item.presence = index_.find(item.key) == nullptr ? Presence::kAbsent : Presence::kPresent;
}

std::uint64_t Finder::list(std::uint64_t cursor, std::size_t most,
                           std::vector<Digest>* keys) const {
  return index_.list(cursor, most, keys);
}

bool Finder::load(Lock& lock, LoadItem& item) noexcept {
  DiskPlace* const found = index_.find(item.key);
  if (found == nullptr) {
    set_outcome(item, LoadOutcome{LoadStatus::kAbsent, Reason::kNone});
    return false;
  }
  if (item.length < found->record_bytes) {
    set_outcome(item, LoadOutcome{LoadStatus::kFailed, Reason::kLength});
    return false;
  }
  item.length = found->record_bytes;
  const DiskPlace place = *found;
  Segment& segment = segments_.at(place.segment);
  const std::shared_ptr<File> file = segment.file;
  const std::uint64_t generation = segment.generation;
  const std::string path = segment.path;
  segments_.pin(segment);
  ++shared_.counts.loaded_records;
  lock.unlock();
  Status status;
  const bool sound = read_frame(*file, place, item.key, generation, item.bytes, &status);
  lock.lock();
  segments_.unpin(segment);
  item.copy = place.sequence;
  set_outcome(item, LoadOutcome{LoadStatus::kLoaded, Reason::kNone});
  if (sound) {
    DiskPlace* const now = index_.find(item.key);
    if (now != nullptr && now->sequence == place.sequence) {
      now->parent = DiskIndex::hash(parent_of_record(item.bytes, item.length));
      used(DiskIndex::hash(item.key));
    }
    return false;
  }
  shared_.notes.add(true,
                    "a record in " + path +
                        (status.ok() ? " is damaged or was replaced, and is removed"
                                     : " cannot be read: " + describe_file_error(path, status)));
  if (is_missing(status)) {
    item.status = LoadStatus::kAbsent;
    return true;
  }
  set_outcome(item, LoadOutcome{LoadStatus::kFailed, Reason::kIo});
  return false;
}

void Finder::used(std::uint64_t key) noexcept {
  constexpr std::uint64_t kShortly = 1024;  // uses
  if (++uses_ == 0) uses_ = 1;
  const auto shortly = static_cast<std::uint32_t>(std::min(kShortly, index_.size() / 8));
  DiskPlace* const first = index_.find(key);
  DiskPlace* at = first;
  for (; at != nullptr; at = index_.find(at->parent)) {
    // (Parents form a circle if a loaded record is damaged.)
    if (at->used == uses_) return;
    if (at != first && at->used != 0 && uses_ - at->used <= shortly) break;
    at->used = uses_;
  }
  if (at == nullptr) return;
  // A chain that is used record by record counts as used at once, and costs little for each.
  for (DiskPlace* below = first; below != at; below = index_.find(below->parent))
    below->used = at->used;
}

void Finder::publish(const PlacedFrame& placed) {
  const FrameHeader& header = placed.header;
  Segment* const segment = segments_.find(placed.segment);
  // (A new file may have the number and the generation of a segment that was dropped.)
  if (segment == nullptr || segment->file != placed.file ||
      segment->generation != header.generation || segment->state == SegmentState::kRetiring ||
      segment->state == SegmentState::kDrained) {
    evicted_.push_back(header.key);
    ++shared_.counts.evicted_records;
    return;
  }
  const auto putting = putting_.find(header.key);
  if (putting != putting_.end() && putting->second > header.name.sequence) return;
  if (const DiskPlace* const other = index_.find(header.key)) live_bytes_ -= frame_bytes_of(*other);
  index_.set(header.key, place_of(placed));
  live_bytes_ += header.frame_bytes();
  segment->records.push_back(frame_place(header.key, placed.block));
  segment->uses = uses_;
}

bool Finder::remove(const Digest& key, std::uint64_t tombstone) {
  const DiskPlace* const place = index_.find(key);
  const auto putting = putting_.find(key);
  if (place != nullptr) {
    live_bytes_ -= frame_bytes_of(*place);
    index_.erase(key);
  } else if (putting == putting_.end() || putting->second == tombstone) {
    return false;
  }
  if (putting != putting_.end()) putting->second = tombstone;
  return true;
}

DiskIndex Finder::remove_all(std::uint64_t tombstone) {
  DiskIndex gone;
  gone.swap(index_);
  live_bytes_ = 0;
  for (auto& [key, last] : putting_)
    last = tombstone;
  for (const auto& [number, segment] : segments_.by_number())
    segment->records.clear();
  return gone;
}

void Finder::evict_at(const Segment& segment, const FramePlace& place) {
  const DiskIndex::Entry* const entry = find_at(segment, place);
  if (entry == nullptr) return;
  const Digest key = entry->key;
  live_bytes_ -= frame_bytes_of(entry->place);
  index_.erase(key);
  evicted_.push_back(key);
  ++shared_.counts.evicted_records;
}

void Finder::take_evicted(std::vector<Digest>* keys) {
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

void Finder::adopt(Segment& segment, const TableEntry& entry) {
  segment.records.push_back(frame_place(entry.key, entry.block));
  if (const DiskPlace* const other = index_.find(entry.key)) {
    if (other->sequence > entry.sequence) return;
    live_bytes_ -= frame_bytes_of(*other);
  }
  const DiskPlace place{.sequence = entry.sequence,
                        .segment = segment.number,
                        .block = entry.block,
                        .record_bytes = entry.record_bytes,
                        .used = 0,
                        .parent = 0};
  index_.set(entry.key, place);
  live_bytes_ += frame_bytes_of(place);
}

}  // namespace kvstrata::disk
