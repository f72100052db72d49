// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Lanes: the bounded queues and threads in which one storage adapter does its blocking work.
//
// Each class of operation has a lane. A lane may have threads of its own; the other lanes share a
// common group of threads, which takes waiting work in the order lookup, load, delete, put.
//
// Work comes as jobs. A job has one or more pieces, which the threads of its lane take in order and
// may run at the same time. The thread that ends the last piece calls the job's end(), and then the
// job is done:
//
//   queued -> running (first piece taken) -> end() -> done -> read (by take_done())
//
// Invariants. (1) submit() never waits: a full or closed lane refuses the job and changes nothing.
// (2) An accepted job runs completely and exactly once, also while the lanes close, so it can free
// what it owns. (3) Puts never occupy the last thread of the common group; if the common group has
// only one thread, lookups get a thread of their own. (4) The writes of a job are visible to the
// thread that takes it from take_done(). (5) Lanes make no callbacks: event_fd() is readable while
// jobs are done and not read.
//
// A thread is started when work first needs it. All methods are thread-safe except the destructor,
// which calls close(). Running out of memory for its own tables ends the process. In a forked child
// the object is unusable: its destructor returns at once.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

namespace kvstrata {

class DoneJobs;
class LaneGroup;

// In order of precedence within the common group. The numbers are part of the binding.
enum class Lane : std::uint8_t { kLookup = 0, kLoad = 1, kDelete = 2, kPut = 3 };
inline constexpr std::size_t kLaneCount = 4;

class LaneJob {
 public:
  virtual ~LaneJob() = default;
  // At least 1; asked once, when the job is submitted.
  [[nodiscard]] virtual std::size_t pieces() const noexcept { return 1; }
  // Runs one piece. Called once for each index in 0 .. pieces() - 1, possibly by several threads at
  // the same time. Must not throw. (Not noexcept: an interpreter that shuts down while a job runs
  // Python code ends the thread by unwinding its stack.)
  virtual void run(std::size_t index) = 0;
  // Called after all pieces, in the thread that ended the last piece.
  virtual void end() noexcept {}
};

struct LaneOptions {
  std::string name;  // begins the threads' names; at most 12 characters are used
  std::uint32_t common_workers = 4;
  std::array<std::uint32_t, kLaneCount> own_workers{};  // 0: served by the common group
  std::uint32_t queue_limit = 1024;                     // pieces that may wait in one lane
};

class Lanes {
 public:
  static constexpr std::uint32_t kMaxWorkers = 256;
  static constexpr std::uint32_t kMaxQueue = 1 << 20;

  // After an error `*out` is unchanged. kBadArgument: an option is out of range; detail(0) is the
  // value. kOsError: the system refuses an eventfd.
  static Status create(const LaneOptions& options, std::unique_ptr<Lanes>* out) noexcept;
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Readable while there are jobs that are done and not read. Closed by the destructor.
  [[nodiscard]] int event_fd() const noexcept;

  // Takes ownership of the job; after an error `job` still belongs to the caller. kQueueFull:
  // queue_limit pieces are already waiting in this lane; `beyond_limit` skips this check, for jobs
  // that complete work which was admitted earlier. kClosed: stop() was called.
  // kOsError: the lane has no thread and cannot start one; detail(0) is errno.
  Status submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit = false) noexcept;

  // Replaces `*out` with the jobs that are done and not read, in the order in which they ended; the
  // caller owns them.
  void take_done(std::vector<std::unique_ptr<LaneJob>>* out) noexcept;

  // Refuses new jobs from now on; accepted jobs still run to their end. When the last thread has
  // left, idle() becomes true and event_fd() becomes readable once more.
  void stop() noexcept;
  [[nodiscard]] bool idle() const noexcept;

  // Calls stop(), waits for all accepted jobs and joins the threads. Done jobs can still be read.
  void close() noexcept;

  // For an owner that must not wait: calls stop(), then frees `lanes` if no piece is waiting or
  // running, and otherwise leaks it for the rest of the process.
  static void abandon(std::unique_ptr<Lanes> lanes) noexcept;

 private:
  explicit Lanes(const LaneOptions& options);

  const pid_t owner_;  // the process that runs the threads
  std::unique_ptr<DoneJobs> done_;
  std::vector<std::unique_ptr<LaneGroup>> groups_;
  std::array<LaneGroup*, kLaneCount> by_lane_{};
};

}  // namespace kvstrata
