// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// One of the servers that share a directory of `fs`. It follows the janitor, or is the janitor
// (fs/states.h).
//
// Invariants
// 1. A server writes only bytes that the janitor in office has granted it. It accepts a grant from
//    a janitor's file only if, after it has read the file, no higher janitor is in office. A
//    successor reads the previous janitor's file when it is in office itself, so it knows every
//    grant that any server has accepted.
// 2. Clocks of different hosts are never compared. A janitor whose file has not changed for the
//    duration of the lease, by the clock of the server that waits, counts as gone. A janitor that
//    was only stalled finds a number higher than its own before it evicts again, and then follows
//    the other janitor.
// 3. join(), tick() and leave() are called by one thread at a time. The other calls never block and
//    may come from any thread.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

#include "base/patience.h"
#include "fs/shared/janitor.h"
#include "fs/states.h"

namespace kvstrata {

struct FsSharedTimes {
  std::chrono::nanoseconds lease = patience(std::chrono::seconds(3));
  std::chrono::nanoseconds beat = std::chrono::milliseconds(500);
  std::chrono::nanoseconds put_wait =
      patience(std::chrono::seconds(1));  // for a grant, or for space
  // Monotonic nanoseconds of this host.
  std::function<std::int64_t()> clock = [] {
    return std::chrono::steady_clock::now().time_since_epoch().count();
  };
};

class FsSharer {
 public:
  // All references must outlive it.
  FsSharer(FileLayer& layer, const FsPaths& paths, FsFiles& files, NoteBook& notes,
           std::uint64_t capacity_bytes, std::string relative_tmp_dir, const FsSharedTimes& times);

  // `who` describes this server to the others. Returns an empty string, or a message that says what
  // is wrong and what to change.
  std::string join(const std::string& who);
  // One turn: reads the states of the other servers, and publishes this server's state if it has
  // changed. The janitor also grants, evicts and, when needed, scans; the scan stops when `go_on`
  // returns false.
  void tick(const std::function<bool()>& go_on);
  void leave();

  // This server's number; the numbers of its parts begin with it.
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

  // Takes bytes for a part out of the grants. False: too few are left.
  [[nodiscard]] bool take(std::uint64_t charge);
  // Adds to the bytes that puts wait for; a negative `charge` subtracts.
  void want(std::int64_t charge);
  // The part that took these bytes is a record now (settle) or is gone (give_back).
  void settle(std::uint64_t charge);
  void give_back(std::uint64_t charge);
  // A record was stored or removed; for the tally.
  void stored(std::uint64_t charge);
  void removed(std::uint64_t charge);

  // Asks the janitor to evict `bytes`. Returns the number of the request, which is answered when
  // space_done() has reached it.
  std::uint64_t ask_for_space(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t space_done();
  void ask_for_scan();

  // Whether this server waits for an answer, so that tick() should be called soon.
  [[nodiscard]] bool is_waiting();
  [[nodiscard]] bool has_janitor();
  // The usage of the directory; nullopt until a janitor has published it.
  [[nodiscard]] std::optional<ConnectorUsage> usage();
  // A load of a record that was last used before this time (unix time) writes its use to the file.
  [[nodiscard]] std::int64_t refresh_before(std::int64_t now_unix_ns);

  void take_evicted(std::vector<Digest>* keys);
  void counts(std::vector<ConnectorCount>* out);

 private:
  void happened(FsSharerEvent event);
  void step();
  void hear_janitor(const FsSharedFolder::Listing& listing, std::int64_t now_ns);
  void take_over(std::uint64_t generation, std::int64_t now_ns);
  void be_janitor(const FsSharedFolder::Listing& listing, std::int64_t now_ns);
  void accept(const FsJanitorState& state, std::uint64_t generation, std::int64_t now_ns);
  [[nodiscard]] bool in_office();
  std::string compare_settings(const FsSharedFolder::Listing& listing);
  Status lock_own();
  void publish_own(std::int64_t now_ns);

  FileLayer& layer_;
  const FsPaths& paths_;
  FsFiles& files_;
  NoteBook& notes_;
  const FsSharedTimes times_;
  FsSharedFolder shared_;
  std::uint64_t id_ = 0;
  std::string who_;
  std::unique_ptr<FileLock> lock_;

  // Used only by the thread that ticks.
  std::unique_ptr<FsJanitor> janitor_;
  // The number of the highest janitor ever seen, and of the last one seen in office: its file has
  // had heard_text_ since heard_ns_.
  std::uint64_t last_generation_ = 0;
  std::uint64_t heard_generation_ = 0;
  std::string heard_text_;
  std::int64_t heard_ns_ = 0;
  std::int64_t published_ns_ = 0;
  std::int64_t beat_ns_ = 0;
  std::string failed_;  // why the last turn could not list the folder

  std::mutex mutex_;
  FsSharerState self_;
  bool news_ = true;  // self_ has changed since it was published
  FsJanitorState janitor_said_;
  std::optional<std::int64_t> janitor_ns_;      // when the janitor last showed that it lives
  FsSharerRole role_ = FsSharerRole::kOutside;  // changed by the thread that ticks
  std::vector<Digest> evicted_;
  std::uint64_t takeovers_ = 0;
  std::uint64_t evicted_count_ = 0;
  std::uint64_t garbage_ = 0;
  std::uint64_t sharers_ = 0;  // that this server knows as the janitor
};

}  // namespace kvstrata
