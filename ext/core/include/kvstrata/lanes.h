// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Lanes: bounded queues and threads in which one storage adapter does its blocking work.
//
// There is one lane per class of operation. A lane with workers of its own has its threads for
// itself; the others share a common group, where a waiting lookup goes before a load, a load before
// a delete and a delete before a put.
//
// Work comes as jobs; a job has one or more pieces, which any threads of its lane take in order and
// run at the same time. Whoever ends a job's last piece runs its end, and then the job is done:
//
//   queued -> running (first piece taken) -> end() -> done -> read (by take_done())
//
// Invariants. (1) submit never waits: a full or closed lane refuses and nothing happens. (2) A job
// that was taken runs whole, exactly once, also while the lanes close, so whatever it owns it can
// let go of itself. (3) Puts never occupy the last free thread of the common group; beside a common
// group of one thread, lookups have a thread of their own. (4) What a job wrote is visible to
// whoever reads it as done. (5) Nothing here is called back; event_fd is readable while jobs are
// done and not read.
//
// Threads start with the first work they are needed for. All methods are thread-safe except the
// destructor, which closes. In a forked child the object is dead: the destructor returns at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvstrata/status.h"

namespace kvstrata {

// In order of precedence within the common group. The numbers are part of the binding.
enum class Lane : std::uint8_t { kLookup = 0, kLoad = 1, kDelete = 2, kPut = 3 };
inline constexpr std::size_t kLaneCount = 4;

class LaneJob {
 public:
  virtual ~LaneJob() = default;
  // At least 1; asked once, when the job is submitted.
  [[nodiscard]] virtual std::size_t pieces() const noexcept { return 1; }
  // Piece `index` of 0 .. pieces() - 1. Called once each, by several threads at the same time. Must
  // not throw. (Not noexcept: an interpreter that ends while its code runs here ends the thread by
  // unwinding it.)
  virtual void run(std::size_t index) = 0;
  // After all pieces, in the thread that ended the last one.
  virtual void end() noexcept {}
};

struct LaneOptions {
  std::string name;  // of the threads; at most 12 characters are used
  std::uint32_t common_workers = 4;
  std::array<std::uint32_t, kLaneCount> own_workers{};  // 0: served by the common group
  std::uint32_t queue_limit = 1024;                     // pieces that may wait in one lane
};

struct LaneCounts {
  std::uint64_t waiting = 0;  // pieces that no thread has begun
  std::uint64_t running = 0;
  std::uint64_t refused = 0;  // jobs, ever
  std::uint64_t done = 0;     // jobs, ever
};

class Lanes {
 public:
  static constexpr std::uint32_t kMaxWorkers = 256;
  static constexpr std::uint32_t kMaxQueue = 1 << 20;

  static Status create(const LaneOptions& options, std::unique_ptr<Lanes>* out) noexcept;
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Readable while there are jobs that are done and not read. Lives as long as the object.
  [[nodiscard]] int event_fd() const noexcept;

  // Takes the job, unless kQueueFull (queue_limit pieces are waiting in this lane already), kClosed
  // or kNoSpace; then `job` stays the caller's. `beyond_limit` is for the end of work that was
  // admitted before.
  Status submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit = false) noexcept;

  // Takes the jobs that are done and not read, in the order in which they ended.
  Status take_done(std::vector<std::unique_ptr<LaneJob>>* out) noexcept;

  [[nodiscard]] LaneCounts counts(Lane lane) const noexcept;

  // Takes nothing more. What was taken runs to its end; event_fd becomes readable once more when
  // the last thread has left, and then idle() is true.
  void stop() noexcept;
  [[nodiscard]] bool idle() const noexcept;

  // stop(), then waits for everything and joins the threads. Done jobs can still be read.
  void close() noexcept;

  // For an owner that must not wait: frees `lanes` if nothing runs or waits, else leaves it to the
  // threads for the rest of the process.
  static void abandon(std::unique_ptr<Lanes> lanes) noexcept;

 private:
  class Impl;

  explicit Lanes(std::unique_ptr<Impl> impl) noexcept;

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
