// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "disk/scrub.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace kvstrata::disk {

namespace {

constexpr double kPauseSeconds = 60;  // after all records were visited
constexpr std::uint64_t kStepBytes = 8 << 20;

}  // namespace

std::uint64_t Scrubber::scrub(Lock& lock, std::uint64_t bytes) noexcept {
  const Segments::Map& segments = segments_.by_number();
  std::uint64_t read = 0;
  // Visits each segment once, and the first one twice: the call may have begun in its middle.
  for (std::size_t visited = 0;
       visited <= segments.size() && read < bytes && !appender_.stopping();) {
    const auto at = segments.find(segment_);
    if (at == segments.end() || record_ >= at->second->records.size()) {
      const auto next = segments.upper_bound(segment_);
      segment_ = next == segments.end() ? 0 : next->first;
      record_ = 0;
      ++visited;
      continue;
    }
    Segment& segment = *at->second;
    const DiskIndex::Entry* const entry = finder_.find_at(segment, segment.records[record_++]);
    if (entry == nullptr) continue;
    const Digest key = entry->key;
    const DiskPlace place = entry->place;
    const RecordMemory memory = record_memory(place.record_bytes);
    if (memory == nullptr) break;
    segments_.pin(segment);
    const std::uint64_t generation = segment.generation;
    const std::shared_ptr<File> file = segment.file;
    const std::string path = segment.path;
    lock.unlock();
    Status status;
    const bool sound = read_frame(*file, place, key, generation, memory.get(), &status) &&
                       may_stay(memory.get(), place.record_bytes, key);
    lock.lock();
    segments_.unpin(segment);
    read += kFrameHeaderBytes + place.record_bytes;
    if (sound || !is_missing(status)) continue;
    Removal bad{.key = key, .copy = place.sequence};
    remover_.remove(lock, std::span(&bad, 1));
    shared_.notes.add(true, "the scrubber found a bad record in " + path);
    // Another copy may have been put meanwhile.
    if (finder_.find(key) == nullptr) finder_.report_evicted(key);
  }
  shared_.counts.scrubbed_bytes += read;
  return read;
}

void Scrubber::run() {
  const std::uint64_t bytes_per_s = shared_.options.scrub_bytes_per_s;
  const std::uint64_t step = std::min(kStepBytes, bytes_per_s);
  Lock lock(shared_.mutex);
  while (!appender_.stopping()) {
    const std::uint64_t read = scrub(lock, step);
    double seconds = static_cast<double>(read) / static_cast<double>(bytes_per_s);
    if (read < step) seconds += kPauseSeconds;
    shared_.due.wait_for(lock, std::chrono::duration<double>(seconds),
                         [this] { return appender_.stopping(); });
  }
}

}  // namespace kvstrata::disk
