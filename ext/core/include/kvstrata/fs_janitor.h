// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The janitor of a shared directory of `fs`: knows how much lies there, grants the members bytes
// that they may write, and evicts the least recently used records to make room for that. One thread
// calls it.
//
// The bound. What lies in the directory is never more than
//
//     scanned + sum over the members of (granted - base)
//
// where `scanned` is the charge of all records, and of the parts of those who are gone, that the
// last scan has seen and that was not evicted since, and `base` is what a member had settled before
// that scan began, which the scan has seen. Invariant: the bound exceeds the cap only by what was
// there before, and grows only by what is granted within the cap.
//
// A member that has gone keeps what it was granted until a scan has ended that began afterwards: a
// part or a name that it has left is seen by that. One that stands still keeps it too.
//
// A successor begins with the bound and the grants of the file of the janitor before, if somebody
// is there still who was there then (else an unshared server may have been at work in between). He
// reads it when he is in office already, so that nobody takes anything that is written later
// (FsMember::tick). Where that file cannot be read, he grants nothing until every member that lives
// has said that it knows him, and so takes nothing from others, and until he has scanned.
#pragma once

#include <functional>
#include <optional>
#include <unordered_map>

#include "kvstrata/fs_files.h"
#include "kvstrata/fs_index.h"
#include "kvstrata/fs_scan.h"
#include "kvstrata/fs_shared_files.h"

namespace kvstrata {

class FsJanitor {
 public:
  // All references must outlive it.
  struct Place {
    FileLayer& layer;
    const FsPaths& paths;
    FsFiles& files;
    FsSharedFiles& shared;
    NoteBook& notes;
    std::uint64_t own_id;
    std::uint64_t capacity_bytes;  // 0: no cap, and nothing to grant
  };
  FsJanitor(const Place& place, std::uint64_t generation)
      : place_(place), generation_(generation) {}

  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }

  // Hears everybody who is listed; `own` is the state of this server's member.
  void hear(const FsSharedFiles::Listing& listing, const FsMemberState& own, std::int64_t clock_ns);
  // Evicts as far as that is needed and decides what is granted. `in_office`, asked again and
  // again, says whether to go on.
  void rule(const std::function<bool()>& in_office);
  // What to publish; changed() says whether that would say something new.
  [[nodiscard]] const FsJanitorState& state() const noexcept { return state_; }
  [[nodiscard]] bool changed() const noexcept { return changed_; }
  void published() noexcept {
    changed_ = false;
    ++state_.beat;
  }
  void leave() noexcept { state_.left = 1; }

  [[nodiscard]] bool wants_scan(std::int64_t clock_ns) const noexcept;
  // Reads the whole directory. hear() must have been called just before, and may be called, as may
  // rule(), from `go_on`. `clock` is the one of clock_ns.
  void scan(const std::function<bool()>& go_on, const std::function<std::int64_t()>& clock);

  void take_evicted(std::vector<Digest>* keys);
  [[nodiscard]] std::uint64_t evicted() const noexcept { return evicted_count_; }
  [[nodiscard]] std::uint64_t garbage() const noexcept { return garbage_; }
  [[nodiscard]] std::uint64_t members() const noexcept { return members_.size(); }

 private:
  struct Member {
    FsMemberState state;
    bool there = false;            // `state` was read
    bool known = false;            // what it was granted is
    std::uint64_t base_bytes = 0;  // settled before the last scan
    std::uint64_t next_base_bytes = 0;
    FsTally base_tally;
    FsTally next_base_tally;
    bool gone = false;
    bool gone_before_scan = false;
    std::unique_ptr<FileLock> lock;  // its own, once it is gone
    std::optional<std::int64_t> probed_ns;
    std::uint64_t scan_asks = 0;  // answered, or about to be
    std::uint64_t space_ask = 0;  // being answered
    std::uint64_t space_freed = 0;
    std::uint64_t space_scans = 0;  // when it was first heard
  };

  void hear_member(std::uint64_t id, Member& member, bool has_lock, std::int64_t clock_ns);
  void succeed(const FsSharedFiles::Listing& listing);
  [[nodiscard]] std::uint64_t bound() const noexcept;
  void grant(std::uint64_t id, std::uint64_t goal_bytes, std::uint64_t* room);
  std::uint64_t evict(std::uint64_t need_bytes, const std::function<bool()>& in_office);
  void answer_space_asks(const std::function<bool()>& in_office);
  void tell();
  FsGrant& granted(std::uint64_t id) { return state_.grants[id]; }

  const Place place_;
  const std::uint64_t generation_;
  FsJanitorState state_;
  bool changed_ = true;
  bool succeeded_ = false;
  bool bound_known_ = false;
  bool short_ = false;         // somebody waits for what there was no room for
  bool nearly_short_ = false;  // members have less than they should have in hand

  std::map<std::uint64_t, Member> members_;
  std::uint64_t scanned_bytes_ = 0;
  std::int64_t used_bytes_ = 0;  // of records, as scanned
  std::int64_t records_ = 0;

  // Of the last scan, most recently used first.
  std::vector<FsScan::Record> candidates_;
  std::int64_t oldest_unix_ns_ = 0;
  std::int64_t scan_unix_ns_ = 0;
  bool scanning_ = false;
  std::uint64_t scans_ = 0;
  std::int64_t scan_began_ns_ = 0;
  std::int64_t next_scan_ns_ = INT64_MIN;
  // While a scan runs: what was evicted, and when that was last used.
  std::unordered_map<Digest, std::int64_t, FsKeyHash> evicted_in_scan_;

  std::vector<Digest> evicted_;  // not taken yet
  std::uint64_t evicted_count_ = 0;
  std::uint64_t garbage_ = 0;
};

}  // namespace kvstrata
