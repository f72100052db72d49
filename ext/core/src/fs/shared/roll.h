// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The servers that share a directory of `fs`, as its janitor knows them: the last state that each
// has published, whether it is gone, and how many bytes it had settled before the last scan. Called
// by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "fs/shared/folder.h"

namespace kvstrata {

class FsRoll {
 public:
  struct Sharer {
    FsSharerState state;
    bool there = false;  // its file exists
    bool known = false;  // its grants are known
    bool gone = false;
    // Its lock, held by this janitor once the server is gone.
    std::unique_ptr<FileLock> lock;
    std::optional<std::int64_t> probed_ns;

    // The bytes that the server had settled before the last scan began, and (next_) before the
    // running scan began.
    std::uint64_t base_bytes = 0;
    std::uint64_t next_base_bytes = 0;
    FsTally base_tally;
    FsTally next_base_tally;
    bool in_scan = false;  // it was on the roll when the running scan began
    bool gone_before_scan = false;

    std::uint64_t scan_asks = 0;    // requests for a scan when the last or the running one began
    std::uint64_t space_ask = 0;    // the request for space that is being answered
    std::uint64_t space_freed = 0;  // bytes freed for that request
    std::uint64_t space_scans = 0;  // scans that had ended when that request was heard
  };
  using Sharers = std::map<std::uint64_t, Sharer>;

  // `folder` must outlive it.
  FsRoll(FsSharedFolder& folder, std::uint64_t own_id) : folder_(folder), own_id_(own_id) {}

  [[nodiscard]] Sharers& sharers() noexcept { return sharers_; }
  [[nodiscard]] const Sharers& sharers() const noexcept { return sharers_; }
  // How many times another server's file could not be read.
  [[nodiscard]] std::uint64_t garbage() const noexcept { return garbage_; }
  [[nodiscard]] bool all_known() const noexcept;
  // The servers that take grants, by number.
  [[nodiscard]] std::vector<std::pair<std::uint64_t, Sharer*>> living();

  // Reads the state of every listed server; `own` is the state of this server. Sets Sharer::known
  // of the servers that are new on the roll to `known`. Returns whether any server is new.
  bool hear(const FsSharedFolder::Listing& listing, const FsSharerState& own, bool known,
            std::int64_t clock_ns);

  // Whether a server asks for a scan, or a server whose grants are unknown is gone, so that only a
  // scan can find the bytes that it has left.
  [[nodiscard]] bool wants_scan() const noexcept;
  void scan_began();
  // Called when the scan has ended: it saw all bytes that the servers had settled before it began.
  // Forgets the servers that were gone when it began, and returns their numbers.
  std::vector<std::uint64_t> scan_ended();

 private:
  void hear_one(std::uint64_t id, Sharer& sharer, bool has_lock, std::int64_t clock_ns);

  FsSharedFolder& folder_;
  const std::uint64_t own_id_;
  Sharers sharers_;
  std::uint64_t garbage_ = 0;
};

}  // namespace kvstrata
