// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// CopyEngine: threads that run gathers and scatters, so that a caller neither waits for a copy nor
// holds the GIL during it.
//
// A job is a list of items (one record each) of one kind and one plan. It is cut into units of
// whole sections, of about kCopyUnitBytes, so that several threads can share one large record. The
// thread that ends the last unit of an item finishes the item (for a gather: writes the header).
//
//   queued -> running (first unit taken) -> done -> read (by completions())
//
// cancel() ends the items of which no unit was taken; the job is done when its other items have
// ended.
//
// Invariants. (1) An accepted job ends in exactly one completion. (2) Queued, running and unread
// jobs together never exceed the queue's capacity, so submit() can refuse but never waits. (3) The
// copy engine owns copies of all descriptors. The blocks and the extents belong to the caller and
// must stay mapped until the job is done. (4) The stores of a job are visible to a thread that
// learns through this class that the job is done. (5) The copy engine makes no callbacks.
//
// All methods are thread-safe except the destructor. In a forked child the object is unusable:
// close() returns at once, the last owner leaks the object, and nothing else may be called. Running
// out of memory for its own tables ends the process.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "copy/items.h"
#include "copy/job_ledger.h"

namespace kvstrata {

class CopyJob;

struct CopyCompletion {
  std::uint64_t job_id;
  std::vector<CopyOutcome> outcomes;  // one for each item
};

class CopyEngine {
 public:
  static constexpr int kMaxThreads = 64;
  static constexpr std::size_t kMaxQueue = 65'536;

  // Starts the threads. With 0 threads only run() can be used, which then copies in its caller's
  // thread. `queue` is the capacity of the queue in jobs. kBadArgument: `threads` or `queue` is out
  // of range. kOsError: the system refuses a thread or the eventfd.
  static Status create(int threads, std::size_t queue, std::shared_ptr<CopyEngine>* out) noexcept;
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  // Readable while there are unread completions. Closed by the destructor.
  [[nodiscard]] int event_fd() const noexcept { return ledger_.event_fd(); }

  // Never waits, and touches neither blocks nor extents. After an error nothing has changed.
  // kQueueFull: try again after completions(). kExists: a job with this id is running, or its
  // completion is not read yet. kClosed: close() was called. kBadArgument, kOutOfRange: detail(2)
  // is the index of the wrong item, or -1.
  Status submit(std::uint64_t job_id, CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                std::vector<CopyItem> items) noexcept;

  // Replaces `*out` with all unread completions, in the order in which the jobs ended.
  void completions(std::vector<CopyCompletion>* out) noexcept;

  // Runs a job before all queued jobs and waits for it; the calling thread and idle copy threads
  // share its units. Fails with the errors of submit(), but never with kQueueFull or kExists.
  Status run(CopyKind kind, std::shared_ptr<const CopyPlan> plan, std::vector<CopyItem> items,
             std::vector<CopyOutcome>* outcomes) noexcept;

  // Cancels the items that have not begun: they end as kCancelled. Items that have begun are copied
  // to their end. The job still ends in a completion, at once if no item had begun. Returns true if
  // any item was cancelled.
  bool cancel(std::uint64_t job_id) noexcept;

  // Refuses new jobs, cancels items that have not begun, waits for the others and joins the
  // threads. Completions can still be read. Idempotent. Does nothing in a forked child.
  void close() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;

  CopyEngine() = default;
  // False in a forked child, which has no threads.
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }
  void work() noexcept;
  // REQUIRES, for both: mutex_ is held.
  bool cancel_rest(const std::shared_ptr<CopyJob>& job) noexcept;
  void finish(const std::shared_ptr<CopyJob>& job) noexcept;

  std::mutex mutex_;
  std::condition_variable work_;                // there are units to take, or it is closing
  std::condition_variable done_;                // a job has ended
  std::deque<std::shared_ptr<CopyJob>> queue_;  // jobs with units that no thread has taken
  JobLedger<CopyJob> ledger_;
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;
  const pid_t owner_ = getpid();
};

}  // namespace kvstrata
