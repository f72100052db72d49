// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/done.h"

#include <new>
#include <utility>

namespace kvstrata {

void DoneJobs::push(QueuedJob* job) noexcept {
  {
    const std::lock_guard lock(mutex_);
    queue_.push(job);
    unread_ += 1;
  }
  signal();
}

Status DoneJobs::take(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
  out->clear();
  const std::lock_guard lock(mutex_);
  try {
    out->reserve(unread_);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the jobs that are done");
  }
  event_.drain();
  for (; unread_ > 0; --unread_) {
    const std::unique_ptr<QueuedJob> done(queue_.pop());
    out->push_back(std::move(done->job));
  }
  return Status();
}

}  // namespace kvstrata
