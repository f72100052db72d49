// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "lanes/lanes.h"

namespace kvstrata {

constexpr std::size_t index_of(Lane lane) noexcept {
  return static_cast<std::size_t>(lane);
}

// A job in a lane and its progress. It is allocated when the job is submitted, so that the threads
// of a lane never have to allocate.
struct QueuedJob {
  std::unique_ptr<LaneJob> job;
  Lane lane;
  std::size_t pieces;
  std::size_t next_piece = 0;  // the first piece that no thread has begun
  std::size_t left;            // pieces that have not ended
  QueuedJob* next = nullptr;
};

// A first-in-first-out list that owns its jobs. Not thread-safe.
class JobQueue {
 public:
  JobQueue() noexcept = default;
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;
  ~JobQueue() {
    while (first_ != nullptr)
      delete pop();
  }

  [[nodiscard]] QueuedJob* first() const noexcept { return first_; }

  void push(QueuedJob* job) noexcept {
    job->next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = job;
    last_ = job;
  }

  // REQUIRES: not empty.
  QueuedJob* pop() noexcept {
    QueuedJob* job = first_;
    first_ = job->next;
    return job;
  }

 private:
  QueuedJob* first_ = nullptr;
  QueuedJob* last_ = nullptr;
};

}  // namespace kvstrata
