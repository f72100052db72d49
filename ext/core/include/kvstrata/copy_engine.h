// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Copy threads: jobs of gathers or scatters that run outside the caller's thread and its GIL.
//
// A job is a list of items (one record each) of one kind and one plan. It is cut into units of
// about kUnitBytes (whole sections), so that several threads share one large record; whoever ends
// the last unit of an item finishes it (for a gather: writes the header).
//
//   queued -> running (first unit taken) -> done -> read (by completions())
//
// Cancelling takes away the items of which no unit was taken; the job is done when the others are.
//
// Invariants. (1) A job that was accepted ends in exactly one completion. (2) queued + running +
// unread jobs never exceed the queue's capacity, so submit can refuse but never waits. (3) The
// engine owns copies of all descriptors; the engine's blocks and the extents are the caller's and
// must stay mapped until the job is done or cancelled. (4) When a job is done, all its stores are
// visible to whoever learned of it through this class. (5) Nothing here is called back.
//
// All methods are thread-safe except the destructor. In a forked child the object is dead: close()
// and the destructor return at once, nothing else may be called.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kvstrata/copy.h"

namespace kvstrata {

enum class CopyKind : std::uint8_t { kGather = 0, kScatter = 1 };

// What became of one item. The numbers are part of the binding.
enum class CopyOutcome : std::uint8_t {
  kOk = 0,
  kStale = 1,       // the record is another chunk's; no block was touched
  kCorrupt = 2,     // the headers or a section are not what their CRC says
  kMismatch = 3,    // a sound record that this plan cannot take: other shape, version or encoding
  kUnverified = 4,  // its CRCs are pending, so it cannot be checked
  kCancelled = 5,   // nothing was copied
  kFailed = 6,      // out of memory; on a GPU, an error of CUDA
};

// What a Status of scatter_record or verify_record says about the record.
CopyOutcome copy_outcome(const Status& status) noexcept;

struct CopyItem {
  std::vector<std::uint32_t> blocks;
  void* record = nullptr;
  std::uint64_t length = 0;  // of the extent
  RecordSpec spec;           // gather: what to write; scatter: only the key, expected
};

struct CopyResult {
  CopyOutcome outcome = CopyOutcome::kOk;
  std::int32_t section = -1;  // first bad section where a section was bad
};

struct CopyCompletion {
  std::uint64_t job_id;
  std::vector<CopyResult> results;
};

// What submit() demands of its items: between 1 and kMaxItems, each fitting the plan. kBadArgument
// / kOutOfRange with detail(2) = index of the item, or -1.
Status check_items(CopyKind kind, const CopyPlan& plan, std::span<const CopyItem> items) noexcept;

// Where the unit of work ends that begins with section `begin`, so that it has at most
// CopyEngine::kUnitBytes or is one section. REQUIRES: plan.payload_bytes(n_blocks) is ok; begin <
// plan.section_count().
std::size_t unit_end(const CopyPlan& plan, std::uint64_t n_blocks, std::size_t begin) noexcept;

class CopyEngine {
 public:
  static constexpr std::uint64_t kUnitBytes = 2 << 20;
  static constexpr int kMaxThreads = 64;
  static constexpr std::size_t kMaxQueue = 65'536;
  static constexpr std::size_t kMaxItems = 65'536;

  // Starts the threads. With 0 threads only run() works, on the caller's thread.
  static Status create(int threads, std::size_t queue, std::unique_ptr<CopyEngine>* out) noexcept;
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Readable while there are unread completions. Lives as long as the object.
  [[nodiscard]] int event_fd() const noexcept;

  // Never waits, touches neither blocks nor extents. kQueueFull: try again after completions();
  // kExists: that id is not read yet; kClosed; kBadArgument / kOutOfRange with detail(2) = index of
  // the item. Refused means that nothing happens.
  Status submit(std::uint64_t job_id, CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                std::vector<CopyItem> items) noexcept;

  // Takes all unread completions, in the order in which the jobs ended.
  Status completions(std::vector<CopyCompletion>* out) noexcept;

  // Does the job now: the calling thread and idle copy threads share the units, before everything
  // that is queued. Errors as submit, but never kQueueFull.
  Status run(CopyKind kind, std::shared_ptr<const CopyPlan> plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results) noexcept;

  // Waits until the job is done. True also for a job whose completion was already read (and for an
  // id that never was: ids are not remembered). False: the time is over, the job goes on.
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) noexcept;

  // Items that have not begun never will and end as kCancelled; those that have begun are copied to
  // their end. The job completes as ever, at once if nothing had begun. Returns whether any item
  // was cancelled.
  bool cancel(std::uint64_t job_id) noexcept;

  // Waits until everything submitted is done.
  void drain() noexcept;

  // Refuses new jobs, cancels what has not begun, waits for the rest, joins the threads.
  // Completions can still be read. Idempotent. Does nothing in a forked child.
  void close() noexcept;

 private:
  class Impl;

  explicit CopyEngine(std::unique_ptr<Impl> impl) noexcept;

  std::unique_ptr<Impl> impl_;
};

}  // namespace kvstrata
