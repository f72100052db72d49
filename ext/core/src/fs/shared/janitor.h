// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The janitor of a shared directory of `fs`. It knows how many bytes lie there, grants the servers
// that share the directory bytes that they may write, and evicts the least recently used records to
// make room for these grants. Called by one thread.
//
// The bound. The bytes in the directory never exceed
//
//     scanned + sum over the servers of (granted - base)
//
// where `scanned` (fs/shared/bound.h) is the charge of the records, and of the parts of servers
// that are gone, that the last scan saw and that were not evicted since; and `base` is how many
// bytes a server had settled before that scan began, so that the scan saw them. Invariant: the
// bound exceeds the cap only by bytes that lay in the directory before, and grows only by grants
// within the cap.
//
// A server that is gone keeps its grants until the end of a scan that began after it was gone: such
// a scan sees every part and every name that the server left. A server that is stalled keeps its
// grants too.
//
// A successor begins with the bound and the grants in the previous janitor's file, if a server that
// the file names is still running (otherwise an unshared server may have used the directory in
// between). The successor reads that file when it is in office already, so that no server accepts a
// grant that is written there later (fs/shared/sharer.h, invariant 1). If it cannot read the file,
// it grants nothing until it has scanned and every running server has published that it knows the
// new janitor and therefore accepts no grant from another.
#pragma once

#include <functional>
#include <vector>

#include "fs/files.h"
#include "fs/shared/bound.h"
#include "fs/shared/roll.h"

namespace kvstrata {

class FsJanitor {
 public:
  // All references must outlive it.
  struct Place {
    FileLayer& layer;
    const FsPaths& paths;
    FsFiles& files;
    FsSharedFolder& shared;
    NoteBook& notes;
    std::uint64_t own_id;
    std::uint64_t capacity_bytes;  // 0: no cap, and nothing to grant
  };
  FsJanitor(const Place& place, std::uint64_t generation)
      : place_(place),
        generation_(generation),
        roll_(place.shared, place.own_id),
        bound_(place.layer, place.paths, place.files, place.shared, place.notes, place.own_id) {}

  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }

  // Reads the state of every listed server; `own` is the state of this server.
  void hear(const FsSharedFolder::Listing& listing, const FsSharerState& own,
            std::int64_t clock_ns);
  // Evicts as much as is needed, and decides the grants. Stops when `in_office`, asked repeatedly,
  // returns false.
  void evict_and_grant(const std::function<bool()>& in_office);
  // The state to publish; changed() says whether it has news.
  [[nodiscard]] const FsJanitorState& state() const noexcept { return state_; }
  [[nodiscard]] bool changed() const noexcept { return changed_; }
  void published() noexcept {
    changed_ = false;
    ++state_.beat;
  }
  void leave() noexcept { state_.left = 1; }

  [[nodiscard]] bool wants_scan(std::int64_t clock_ns) const noexcept;
  // Reads the whole directory. `clock` returns clock_ns. hear() and evict_and_grant() may be called
  // from `go_on`. REQUIRES: hear() was called just before.
  void scan(const std::function<bool()>& go_on, const std::function<std::int64_t()>& clock);

  void take_evicted(std::vector<Digest>* keys) { bound_.take_evicted(keys); }
  [[nodiscard]] std::uint64_t evicted() const noexcept { return bound_.evicted(); }
  // How many times another server's file could not be read.
  [[nodiscard]] std::uint64_t garbage() const noexcept { return roll_.garbage(); }
  [[nodiscard]] std::uint64_t sharers() const noexcept { return roll_.sharers().size(); }

 private:
  using Sharer = FsRoll::Sharer;

  void succeed(const FsSharedFolder::Listing& listing);
  [[nodiscard]] std::uint64_t bound_bytes() const noexcept;
  void grant_to_living(const std::function<bool()>& in_office);
  void grant(std::uint64_t id, std::uint64_t goal_bytes, std::uint64_t* room);
  void answer_space_asks(const std::function<bool()>& in_office);
  void update_state();
  FsGrant& granted(std::uint64_t id) { return state_.grants[id]; }

  const Place place_;
  const std::uint64_t generation_;
  FsRoll roll_;
  FsBound bound_;
  FsJanitorState state_;
  bool changed_ = true;
  bool succeeded_ = false;     // succeed() has run
  bool short_ = false;         // a server waits for bytes, and there was no room to grant them
  bool nearly_short_ = false;  // servers have fewer unused grants than they should have
};

}  // namespace kvstrata
