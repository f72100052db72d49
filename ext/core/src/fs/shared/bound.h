// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The knowledge that the janitor of a shared directory of `fs` has from its last scan: how many
// bytes lie in the directory, and which records it evicts next. Called by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/key_hash.h"
#include "fs/files.h"
#include "fs/scan.h"
#include "fs/shared/folder.h"

namespace kvstrata {

class FsBound {
 public:
  // All references must outlive it. `own_id` names this server's temporary files.
  FsBound(FileLayer& layer, const FsPaths& paths, FsFiles& files, FsSharedFolder& folder,
          NoteBook& notes, std::uint64_t own_id)
      : layer_(layer),
        paths_(paths),
        files_(files),
        folder_(folder),
        notes_(notes),
        own_id_(own_id) {}

  // Takes over the numbers of the previous janitor.
  void succeed(const FsJanitorState& before);

  // Whether the numbers below are known.
  [[nodiscard]] bool known() const noexcept { return known_; }
  // Charge of the records and of the parts of gone servers, as of the last scan, less what was
  // evicted or found deleted since.
  [[nodiscard]] std::uint64_t scanned_bytes() const noexcept { return scanned_bytes_; }
  // Approximate charge of the records alone.
  [[nodiscard]] std::int64_t used_bytes() const noexcept { return used_bytes_; }
  [[nodiscard]] std::int64_t records() const noexcept { return records_; }
  // When the record that is evicted next was last used; unix time.
  [[nodiscard]] std::int64_t oldest_unix_ns() const noexcept { return oldest_unix_ns_; }
  [[nodiscard]] bool has_candidates() const noexcept { return !candidates_.empty(); }

  // Evicts the least recently used records until `need_bytes` are freed, no candidate is left, or
  // it has looked at 1024 of them. Returns the bytes freed. A record that was used or replaced
  // since the scan is left to the next scan. Stops when `in_office`, asked repeatedly, returns
  // false.
  std::uint64_t evict(std::uint64_t need_bytes, const std::function<bool()>& in_office);

  [[nodiscard]] std::uint64_t scans() const noexcept { return scans_; }
  [[nodiscard]] std::int64_t scan_began_ns() const noexcept { return scan_began_ns_; }
  [[nodiscard]] bool may_scan(std::int64_t clock_ns) const noexcept {
    return clock_ns >= next_scan_ns_;
  }
  // Reads the whole directory; evict() may be called from `go_on`. nullopt: the directory could not
  // be read, or `go_on` returned false.
  std::optional<FsScan> scan(const std::function<bool()>& go_on,
                             const std::function<std::int64_t()>& clock);
  // Adopts the outcome of scan(). It counts only those parts whose server is gone, for which
  // `is_there` returns false.
  void take(const FsScan& found, const std::function<bool(std::uint64_t id)>& is_there);

  void take_evicted(std::vector<Digest>* keys);
  [[nodiscard]] std::uint64_t evicted() const noexcept { return evicted_count_; }

 private:
  FileLayer& layer_;
  const FsPaths& paths_;
  FsFiles& files_;
  FsSharedFolder& folder_;
  NoteBook& notes_;
  const std::uint64_t own_id_;

  bool known_ = false;
  std::uint64_t scanned_bytes_ = 0;
  std::int64_t used_bytes_ = 0;
  std::int64_t records_ = 0;
  std::vector<FsScan::Record> candidates_;  // of the last scan, most recently used first
  std::int64_t oldest_unix_ns_ = 0;

  std::uint64_t scans_ = 0;  // completed
  std::int64_t scan_unix_ns_ = 0;
  std::int64_t scan_began_ns_ = 0;
  std::int64_t next_scan_ns_ = INT64_MIN;
  bool scanning_ = false;
  // Records that were evicted or found deleted while the scan runs, with their last use.
  std::unordered_map<Digest, std::int64_t, KeyHash> evicted_in_scan_;

  std::vector<Digest> evicted_;  // not taken yet
  std::uint64_t evicted_count_ = 0;
};

}  // namespace kvstrata
