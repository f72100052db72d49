// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// One server among those that share a directory of `fs`:
//
//   joined -> hears the janitor <-> is the janitor -> left
//
// Invariants
// 1. It writes only what the janitor in office has granted it, and takes a grant from his file only
//    if, after it has read that, nobody else was in office yet. So who takes over, and reads the
//    file of the one before when he is in office, knows of everything that anybody took.
// 2. Nobody compares clocks of hosts: a janitor whose file has not changed for the lease, on the
//    clock of who waits, is taken to be gone. One that only stood still finds a higher number than
//    his before he evicts again, and is an ordinary member.
// 3. join(), tick() and leave() are called by one thread at a time; the others never block.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

#include "kvstrata/fs_janitor.h"

namespace kvstrata {

struct FsSharedTimes {
  std::chrono::nanoseconds lease = std::chrono::seconds(3);
  std::chrono::nanoseconds beat = std::chrono::milliseconds(500);
  std::chrono::nanoseconds put_wait = std::chrono::seconds(1);  // for a grant, or for space
  // Monotonic nanoseconds of this host.
  std::function<std::int64_t()> clock = [] {
    return std::chrono::steady_clock::now().time_since_epoch().count();
  };
};

class FsMember {
 public:
  // All references must outlive it.
  FsMember(FileLayer& layer, const FsPaths& paths, FsFiles& files, NoteBook& notes,
           std::uint64_t capacity_bytes, std::string relative_tmp_dir, const FsSharedTimes& times);

  // `who` is what others are told about it. Returns what is wrong and what to change, or nothing.
  std::string join(const std::string& who);
  // Hears the others and says what is new; as the janitor, does what there is to do. `go_on`, asked
  // while a directory is read, says whether to go on with that.
  void tick(const std::function<bool()>& go_on);
  void leave();

  // The numbers of its parts begin with it.
  [[nodiscard]] std::uint64_t id() const noexcept { return id_; }

  // Bytes for a part, out of what is granted.
  [[nodiscard]] bool take(std::uint64_t charge);
  // So much more is waited for, from now on, or less.
  void want(std::int64_t charge);
  // A part has its name now, or is not there any more.
  void settle(std::uint64_t charge);
  void give_back(std::uint64_t charge);
  void stored(std::uint64_t charge);
  void removed(std::uint64_t charge);

  // Asks the janitor to evict so many bytes; done when space_done() is no less.
  std::uint64_t ask_for_space(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t space_done();
  void ask_for_scan();

  // Whether it waits for an answer, and tick() should come soon.
  [[nodiscard]] bool is_waiting();
  [[nodiscard]] bool has_janitor();
  // What lies there: nothing as long as no janitor has said it.
  [[nodiscard]] std::optional<ConnectorUsage> usage();
  // A record that was last used before this is said to be used when it is; unix time.
  [[nodiscard]] std::int64_t refresh_before(std::int64_t now_unix_ns);

  void take_evicted(std::vector<Digest>* keys);
  void counts(std::vector<ConnectorCount>* out);

 private:
  void step();
  void hear_janitor(const FsSharedFiles::Listing& listing, std::int64_t now_ns);
  void take_over(std::uint64_t generation, std::int64_t now_ns);
  void be_janitor(const FsSharedFiles::Listing& listing, std::int64_t now_ns);
  void accept(const FsJanitorState& state, std::uint64_t generation, std::int64_t now_ns);
  [[nodiscard]] bool in_office();
  std::string compare_settings(const FsSharedFiles::Listing& listing);
  Status lock_own();
  void say(std::int64_t now_ns);

  FileLayer& layer_;
  const FsPaths& paths_;
  FsFiles& files_;
  NoteBook& notes_;
  const FsSharedTimes times_;
  FsSharedFiles shared_;
  std::uint64_t id_ = 0;
  std::string who_;
  std::unique_ptr<FileLock> lock_;

  // Of the thread that ticks.
  std::unique_ptr<FsJanitor> janitor_;
  bool deposed_ = false;
  std::uint64_t last_generation_ = 0;   // the highest ever heard
  std::uint64_t heard_generation_ = 0;  // since heard_ns_, with this text
  std::string heard_text_;
  std::int64_t heard_ns_ = 0;
  std::int64_t said_ns_ = 0;
  std::int64_t beat_ns_ = 0;
  std::string failed_;  // what could not be done the last time

  std::mutex mutex_;
  FsMemberState self_;
  bool news_ = true;  // self_ has changed since it was said
  FsJanitorState janitor_said_;
  std::optional<std::int64_t> janitor_ns_;  // when it was last heard to be there
  bool is_janitor_ = false;
  std::vector<Digest> evicted_;
  std::uint64_t takeovers_ = 0;
  std::uint64_t evicted_count_ = 0;
  std::uint64_t garbage_ = 0;
  std::uint64_t members_ = 0;
};

}  // namespace kvstrata
