// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// JobLedger: the jobs of a copy engine and the state of each. The copy engines of the CPU and of a
// GPU use the same ledger, and each runs the jobs itself.
//
//   state \ call   accept        end                                  forget_ended
//   unknown        running
//   running        kExists       ended (unknown, if it is not reported)
//   ended          kExists                                            unknown
//
// Invariants. (1) A reported job that was accepted is in ended() exactly once, once it has ended.
// (2) Reported jobs that are running or ended never exceed the capacity, so end() never allocates.
//
// REQUIRES, for all calls but event_fd(): the copy engine's mutex is held. The ledger takes no
// lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/event_fd.h"
#include "base/status.h"

namespace kvstrata {

// A `Job` has an `id`, a flag `reported` (true if its end goes to ended()), and a flag `done`,
// which end() sets.
template <typename Job>
class JobLedger {
 public:
  using Jobs = std::vector<std::shared_ptr<Job>>;

  // REQUIRES: open() was not called before.
  Status open(std::size_t capacity) {
    capacity_ = capacity;
    ended_.reserve(capacity);
    return event_.open();
  }

  // Readable while ended() is not empty.
  [[nodiscard]] int event_fd() const noexcept { return event_.fd(); }

  // From now on no job is accepted.
  void close() noexcept { closed_ = true; }
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  // kClosed after close().
  [[nodiscard]] Status check_open() const noexcept {
    return closed_ ? Status(StatusCode::kClosed, "the copy engine is closed", 0, 0, -1) : Status();
  }

  // kClosed: close() was called. kQueueFull, kExists: see CopyEngine::submit(). After an error
  // nothing has changed.
  Status accept(const std::shared_ptr<Job>& job) {
    KVSTRATA_RETURN_IF_ERROR(check_open());
    if (job->reported) {
      if (unread_.size() >= capacity_)
        return Status(StatusCode::kQueueFull, "queue: full", static_cast<std::int64_t>(capacity_));
      if (!unread_.try_emplace(job->id, job).second)
        return Status(StatusCode::kExists, "job_id: the completion of this id was not read yet",
                      static_cast<std::int64_t>(job->id), 0, -1);
    }
    ++running_;
    return Status();
  }

  // REQUIRES: the job is running.
  void end(const std::shared_ptr<Job>& job) noexcept {
    job->done = true;
    --running_;
    if (!job->reported) return;
    ended_.push_back(job);
    event_.signal();
  }

  // The reported jobs that ended since the last forget_ended(), in the order in which they ended.
  // The reference is valid until the next call that is not const.
  [[nodiscard]] const Jobs& ended() const noexcept { return ended_; }
  void forget_ended() noexcept {
    event_.drain();
    for (const std::shared_ptr<Job>& job : ended_)
      unread_.erase(job->id);
    ended_.clear();
  }

  // A reported job that is running or ended, or null.
  [[nodiscard]] std::shared_ptr<Job> find(std::uint64_t id) const noexcept {
    const auto found = unread_.find(id);
    return found == unread_.end() ? nullptr : found->second;
  }
  // All reported jobs that are running or ended, in no order.
  [[nodiscard]] const std::unordered_map<std::uint64_t, std::shared_ptr<Job>>& unread()
      const noexcept {
    return unread_;
  }

  // True if no job is running, reported or not.
  [[nodiscard]] bool idle() const noexcept { return running_ == 0; }

 private:
  std::size_t capacity_ = 0;
  std::size_t running_ = 0;
  bool closed_ = false;
  std::unordered_map<std::uint64_t, std::shared_ptr<Job>> unread_;  // running or ended
  Jobs ended_;
  EventFd event_;
};

}  // namespace kvstrata
