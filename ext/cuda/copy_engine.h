// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The copy engine of a GPU: jobs of gathers (blocks -> records) and scatters (records -> blocks) as
// in copy/engine.h, but the blocks lie in a device's memory.
//
// Each direction has a stream (of high priority for loads, of low priority for stores), a thread
// that queues copies on the stream and a thread that waits for their ends. Helper threads compute
// checksums of the payloads, which lie in host memory.
//
//   queued -> begun (its copies are on the stream) -> ended (event reached, checksums done) -> read
//
//   gather   The magic of the record is destroyed, and copies are queued behind the plan's moment.
//            When the stream has reached the item's event, helpers compute the CRCs of the payload
//            in place, and the helper that ends the last CRC writes the header.
//   scatter  The header is checked; if it is bad, the item ends and no block is touched. Otherwise
//            copies are queued, and meanwhile helpers verify the payload. The item ends after both.
//   layerwise scatter: the items of a job begin together and are copied section by section, with an
//            event after each section, so that another stream can wait for it (await_section).
//
// A gather with a rounding of numbers that cannot be rounded (infinite or a NaN) ends as kFailed,
// without a header.
//
// Invariants. (1) An accepted job ends in exactly one completion. (2) An item ends only when the
// stream has reached its event, even if the item failed or the job was cancelled; until then its
// extent and its blocks are in use. The exception is a sticky error, after which the context is
// lost and touches no memory. (3) Queued, begun and unread jobs together never exceed the queue's
// capacity. (4) The items that an error of CUDA has hit end as kFailed, and no others, unless the
// error is sticky: then failed() returns it and every later item ends as kFailed. (5) Only
// await_section makes a stream of the caller wait, and no function synchronises with such a stream.
//
// All methods are thread-safe except the destructor. In a forked child the object is unusable:
// close() returns at once, the last owner leaks the object, and nothing else may be called.
//
// One mutex guards all state. It is never held during a call of the driver that may wait, during a
// checksum or while a header is written. PinnedMemory and Device have mutexes of their own, inside
// which no other is taken; close_mutex_ is taken before the main mutex. copy_engine.cpp has the
// functions that callers call, copy_items.cpp the work of the threads on the items of a job.
#pragma once

#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/engine.h"
#include "copy/job_ledger.h"
#include "mover.h"

namespace kvstrata::cuda {

struct EngineOptions {
  Way way = Way::kDma;
  int threads = 8;       // threads that compute checksums
  unsigned max_sms = 4;  // most thread blocks of a kernel; each runs on one multiprocessor
  std::uint64_t staging_bytes = 64 << 20;  // for each direction, if `rounds`
  std::size_t queue = 256;                 // jobs
  bool rounds = false;  // takes plans with a rounding; then never by dma, and always with staging
};

// The state of one item that has begun.
struct Progress {
  // Guarded by the copy engine's mutex.
  std::size_t parts_left = 0;  // units of checksums, and parts of the device's copies
  CopyOutcome outcome = CopyOutcome::kOk;
  bool device_failed = false;
  // A gather fills the section table; a scatter compares with the CRCs of the record's table.
  std::vector<Section> sections;
  std::vector<std::uint32_t> expected;
};

struct Job {
  std::uint64_t id = 0;
  CopyKind kind = CopyKind::kGather;
  bool reported = false;  // its end goes to completions()
  CudaPlan plan;
  std::vector<CopyItem> items;
  std::vector<Progress> progress;
  // Guarded by the copy engine's mutex.
  std::size_t next_item = 0;   // the first item that has not begun
  std::size_t end_item = 0;    // a cancellation makes it smaller
  std::size_t items_left = 0;  // not ended yet
  bool moment_awaited = false;
  bool lost = false;  // cancelled, or met an error of CUDA: sections may never be in place
  bool done = false;
  // The moments after which sections are in place: one for each section of a layerwise job,
  // otherwise one for all sections.
  std::vector<std::shared_ptr<Moment>> sections_queued;

  [[nodiscard]] bool layerwise() const noexcept {
    return plan.layerwise && kind == CopyKind::kScatter;
  }
  [[nodiscard]] unsigned char* payload(std::size_t item) const noexcept {
    const auto sections = static_cast<std::uint32_t>(plan.copy->section_count());
    return static_cast<unsigned char*>(items[item].record) + record_header_bytes(sections);
  }
  [[nodiscard]] std::uint64_t payload_bytes(std::size_t item) const noexcept {
    return plan.copy->section_offset(plan.copy->section_count(), items[item].blocks.size());
  }
};

// Checksums of sections [begin, end) of one item.
struct Unit {
  std::shared_ptr<Job> job;
  std::size_t item;
  std::size_t begin;
  std::size_t end;
};

// Items of which sections [begin, end) are queued: all of them, or a part of a large gather. The
// copies have ended when the stream has reached `moment`; if `moment` is null, they have ended
// already or the context is lost.
struct Begun {
  std::shared_ptr<Job> job;
  std::vector<std::size_t> items;
  std::size_t begin = 0;
  std::size_t end = 0;
  std::shared_ptr<Moment> moment;
  std::uint64_t bytes = 0;
};

// The gathers or the scatters of a copy engine.
struct Direction {
  Direction(std::shared_ptr<Device> device, unsigned max_sms) : mover(std::move(device), max_sms) {}
  Mover mover;
  std::deque<std::shared_ptr<Job>> queue;  // jobs with items that have not begun
  std::deque<Begun> begun;                 // in the order of the stream
  std::uint64_t ahead_bytes = 0;           // of begun
  std::condition_variable queued;          // work for the submitting thread
  std::condition_variable came;            // work for the finishing thread
  bool submitting = true;                  // the submitting thread runs
};

class CudaCopyEngine {
 public:
  // Starts the threads. Sets `*status` to kBadArgument if an option is out of range, or to another
  // error that is not one of CUDA; returns a failure of CUDA, or says why records cannot be
  // rounded.
  // `*out` is set only if both are ok.
  static Failure create(std::shared_ptr<Device> device, const EngineOptions& options,
                        Status* status, std::shared_ptr<CudaCopyEngine>* out);
  ~CudaCopyEngine();
  CudaCopyEngine(const CudaCopyEngine&) = delete;
  CudaCopyEngine& operator=(const CudaCopyEngine&) = delete;

  // See the functions of CopyEngine. These may throw std::bad_alloc.
  [[nodiscard]] int event_fd() const noexcept { return ledger_.event_fd(); }
  Status submit(std::uint64_t job_id, CopyKind kind, CudaPlan plan, std::vector<CopyItem> items) {
    std::shared_ptr<Job> job;
    return start(job_id, true, kind, std::move(plan), std::move(items), &job);
  }
  void completions(std::vector<CopyCompletion>* out);
  Status run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
             std::vector<CopyOutcome>* outcomes);
  bool cancel(std::uint64_t job_id);
  void close();

  // The way that copies take: dma if the options name the kernel and the device has none.
  [[nodiscard]] Way way() const noexcept { return options_.way; }
  // Why it is another way than the options name; "" if it is that way.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

  // The moment after all work that the caller has queued on its `stream` so far.
  Failure moment(Stream stream, std::shared_ptr<Moment>* out);
  // Waits until the copies of that section (of all sections, unless the job is a layerwise scatter)
  // of all items of the job are queued, then makes `stream` wait for them. `*queued` is false if
  // the timeout (a year at most) passed, or the job was cancelled or met an error of CUDA; it is
  // true at once for a job whose completion was read.
  Failure await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                        std::chrono::nanoseconds timeout, bool* queued);

  PinnedMemory& pinned() noexcept { return pinned_; }
  // The sticky error, if there was one.
  [[nodiscard]] Failure failed() const {
    const std::lock_guard lock(mutex_);
    return failed_;
  }

 private:
  using Lock = std::unique_lock<std::mutex>;

  CudaCopyEngine() = default;
  // False in a forked child, which has neither the threads nor a driver.
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }
  Status start(std::uint64_t job_id, bool reported, CopyKind kind, CudaPlan plan,
               std::vector<CopyItem> items, std::shared_ptr<Job>* out);
  // Whether the engine can take a plan with a rounding.
  [[nodiscard]] Status check_rounding(const CopyPlan& plan, std::span<const CopyItem> items) const;
  void submit_items(Direction& direction);
  void finish_items(Direction& direction);
  void help();
  // Begins items [first, last) of the job: checks them and queues their copies. Called without the
  // mutex.
  void begin(Direction& direction, const std::shared_ptr<Job>& job, std::size_t first,
             std::size_t last);
  Failure queue_copies(Direction& direction, const std::shared_ptr<Job>& job,
                       const std::vector<std::size_t>& items, Begun* last);
  void compute(const Unit& unit);
  // REQUIRES, for all below: mutex_ is held.
  void add_begun(Direction& direction, Begun begun);
  // Hands the checksums of sections [begin, end) to the helpers.
  void add_units(const std::shared_ptr<Job>& job, std::size_t item, std::size_t begin,
                 std::size_t end);
  void end_part(Lock& lock, const std::shared_ptr<Job>& job, std::size_t item);
  void end_item(const std::shared_ptr<Job>& job, std::size_t item);
  void finish(const std::shared_ptr<Job>& job);
  bool cancel_rest(Direction& direction, const std::shared_ptr<Job>& job, CopyOutcome outcome);
  void fail(const Failure& failure);
  Direction& direction_of(CopyKind kind) { return *directions_[static_cast<std::size_t>(kind)]; }

  std::shared_ptr<Device> device_;
  EngineOptions options_;
  PinnedMemory pinned_;
  mutable std::mutex mutex_;
  std::array<std::unique_ptr<Direction>, 2> directions_;
  std::condition_variable work_;      // units, or closing
  std::condition_variable progress_;  // a job ended, a section was queued
  std::deque<Unit> units_;
  JobLedger<Job> ledger_;
  std::string reason_;
  Failure failed_;
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;
  const pid_t owner_ = getpid();
};

}  // namespace kvstrata::cuda
