// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/event_fd.h"
#include "lanes/job_queue.h"

namespace kvstrata {

// The jobs of all groups that are done and not read yet, in the order in which they ended.
// Thread-safe. No other lock is taken inside its mutex, which a thread may take while it has the
// mutex of a group.
class DoneJobs {
 public:
  // Called before anything else; see EventFd::open().
  Status open() noexcept { return event_.open(); }
  [[nodiscard]] int event_fd() const noexcept { return event_.fd(); }

  // Takes ownership of `job`.
  void push(QueuedJob* job) noexcept;
  // Makes event_fd() readable although no job is new, because the last thread of a group has left.
  void signal() const noexcept { event_.signal(); }
  // See Lanes::take_done().
  Status take(std::vector<std::unique_ptr<LaneJob>>* out) noexcept;

 private:
  EventFd event_;
  std::mutex mutex_;
  JobQueue queue_;
  std::size_t unread_ = 0;
};

}  // namespace kvstrata
