// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "fs/shared/bound.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"

namespace kvstrata {

namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
// Parts that were not written to for this long, by the file system's clock, are removed.
constexpr std::int64_t kPartAgeNs = 600 * kSecondNs;
// After a scan that took t, the next one begins kScanRest * t later at the earliest.
constexpr std::int64_t kScanRest = 4;
constexpr std::size_t kEvictBatch = 32;
constexpr std::size_t kLooksPerTurn = 1024;

std::uint64_t minus_or_zero(std::uint64_t from, std::uint64_t what) noexcept {
  return from - std::min(from, what);
}

}  // namespace

void FsBound::succeed(const FsJanitorState& before) {
  known_ = before.bound_known != 0;
  scanned_bytes_ = before.bound_bytes;
  used_bytes_ = static_cast<std::int64_t>(before.used_bytes);
  records_ = static_cast<std::int64_t>(before.records);
  oldest_unix_ns_ = static_cast<std::int64_t>(before.oldest_unix_ns);
}

std::uint64_t FsBound::evict(std::uint64_t need_bytes, const std::function<bool()>& in_office) {
  std::uint64_t done = 0;
  std::size_t looks = 0;
  while (done < need_bytes && !candidates_.empty() && looks < kLooksPerTurn && in_office()) {
    std::vector<FsFiles::Removal> removals;
    std::vector<FsScan::Record> records;
    std::uint64_t batch_bytes = 0;
    while (done + batch_bytes < need_bytes && !candidates_.empty() &&
           removals.size() < kEvictBatch && looks < kLooksPerTurn) {
      const FsScan::Record record = candidates_.back();
      candidates_.pop_back();
      oldest_unix_ns_ = record.recency_unix_ns;
      looks += 1;
      FileStat found;
      const Status status = layer_.stat(paths_.record(record.key), &found);
      if (is_not_there(status)) {  // deleted since the scan
        scanned_bytes_ = minus_or_zero(scanned_bytes_, fs_charge(record.length));
        done += fs_charge(record.length);
        if (scanning_) evicted_in_scan_[record.key] = record.recency_unix_ns;
      } else if (status.ok() && found.length == record.length &&
                 fs_recency(found) == record.recency_unix_ns) {
        removals.push_back({.key = record.key});
        records.push_back(record);
        batch_bytes += fs_charge(record.length);
      }
    }
    files_.unlink(removals, false);
    for (std::size_t i = 0; i < removals.size(); ++i) {
      const std::uint64_t charge = fs_charge(records[i].length);
      if (removals[i].after != FsFiles::After::kThere) evicted_.push_back(removals[i].key);
      if (removals[i].after != FsFiles::After::kGone) continue;
      scanned_bytes_ = minus_or_zero(scanned_bytes_, charge);
      used_bytes_ -= static_cast<std::int64_t>(charge);
      records_ -= 1;
      done += charge;
      evicted_count_ += 1;
      if (scanning_) evicted_in_scan_[removals[i].key] = records[i].recency_unix_ns;
    }
  }
  if (candidates_.empty()) oldest_unix_ns_ = std::max(oldest_unix_ns_, scan_unix_ns_);
  return done;
}

std::optional<FsScan> FsBound::scan(const std::function<bool()>& go_on,
                                    const std::function<std::int64_t()>& clock) {
  scan_began_ns_ = clock();
  FsScan found;
  std::int64_t now_there_ns = 0;
  Status status = folder_.now(own_id_, &now_there_ns);
  const std::int64_t now_here_ns = now_unix_ns();
  if (!status.ok()) found.failed = describe_file_error(folder_.folder(), status);
  scanning_ = true;
  if (status.ok())
    status = scan_fs_directory(layer_, paths_, now_there_ns - kPartAgeNs, go_on, &found);
  scanning_ = false;
  const std::int64_t ended_ns = clock();
  next_scan_ns_ = ended_ns + kScanRest * (ended_ns - scan_began_ns_);
  if (!status.ok()) {
    evicted_in_scan_.clear();
    next_scan_ns_ = std::max(next_scan_ns_, ended_ns + kSecondNs);
    if (status.code() != StatusCode::kCancelled)
      notes_.add(true, "the names in " + paths_.base() + " could not be read: " + found.failed);
    return std::nullopt;
  }
  scan_unix_ns_ = now_here_ns;
  return found;
}

void FsBound::take(const FsScan& found, const std::function<bool(std::uint64_t)>& is_there) {
  const auto evicted = std::exchange(evicted_in_scan_, {});
  scanned_bytes_ = 0;
  used_bytes_ = 0;
  records_ = 0;
  for (const FsScan::Part& part : found.parts) {
    if (!is_there(part.number >> kFsPartBits)) scanned_bytes_ += fs_charge(part.length);
  }
  candidates_.clear();
  for (auto record = found.records.rbegin(); record != found.records.rend(); ++record) {
    const auto gone = evicted.find(record->key);
    if (gone != evicted.end() && gone->second == record->recency_unix_ns) continue;
    candidates_.push_back(*record);
    const std::uint64_t charge = fs_charge(record->length);
    scanned_bytes_ += charge;
    used_bytes_ += static_cast<std::int64_t>(charge);
    records_ += 1;
  }
  oldest_unix_ns_ = candidates_.empty() ? scan_unix_ns_ : candidates_.back().recency_unix_ns;
  known_ = true;
  scans_ += 1;
}

void FsBound::take_evicted(std::vector<Digest>* keys) {
  keys->insert(keys->end(), evicted_.begin(), evicted_.end());
  evicted_.clear();
}

}  // namespace kvstrata
