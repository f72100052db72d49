// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Inside the copy engine of a GPU: its jobs, its two directions, and the state that its threads
// share. copy_engine.cpp has the functions that callers call, copy_items.cpp the work of the
// threads on the items of a job.
//
// One mutex guards all state. It is never held during a call of the driver that may wait, during a
// checksum or while a header is written. PinnedMemory and Device have mutexes of their own, inside
// which no other is taken; close_mutex_ is taken before the main mutex.
#pragma once

#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy/job_ledger.h"
#include "copy_engine.h"

namespace kvstrata::cuda {

// The state of one item that has begun.
struct Progress {
  // Guarded by the copy engine's mutex.
  std::size_t parts_left = 0;  // units of checksums, and parts of the device's copies
  CopyResult result;
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

class CudaCopyEngine::Impl {
 public:
  static Failure create(std::shared_ptr<Device> device, const EngineOptions& options,
                        Status* status, std::unique_ptr<Impl>* out);
  ~Impl();

  Status start(std::uint64_t job_id, bool reported, CopyKind kind, CudaPlan plan,
               std::vector<CopyItem> items, std::shared_ptr<Job>* out);
  void completions(std::vector<CopyCompletion>* out);
  // Whether the engine can take a plan with a rounding.
  [[nodiscard]] Status check_rounding(const CopyPlan& plan, std::span<const CopyItem> items) const;
  Status run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results);
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout);
  bool cancel(std::uint64_t job_id);
  void drain();
  void close();
  Failure moment(Stream stream, std::shared_ptr<Moment>* out);
  Failure await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                        std::chrono::nanoseconds timeout, bool* queued);

  [[nodiscard]] Way way() const noexcept { return options_.way; }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] Failure failed() const {
    const std::lock_guard lock(mutex_);
    return failed_;
  }
  [[nodiscard]] int event_fd() const noexcept { return ledger_.event_fd(); }
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }
  PinnedMemory& pinned() noexcept { return pinned_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Impl() = default;
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
  pid_t owner_ = 0;
};

}  // namespace kvstrata::cuda
