// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/group.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace kvstrata {

LaneGroup::LaneGroup(std::string name, std::uint32_t workers, bool serves_many,
                     std::uint32_t queue_limit, DoneJobs* done)
    : name_(std::move(name)),
      workers_(workers),
      max_puts_(serves_many && workers > 1 ? workers - 1 : workers),
      queue_limit_(queue_limit),
      done_(done) {
  threads_.reserve(workers);
}

Status LaneGroup::submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept {
  const std::size_t pieces = job->pieces();
  std::unique_ptr<QueuedJob> queued(
      new (std::nothrow) QueuedJob{.job = nullptr, .lane = lane, .pieces = pieces, .left = pieces});
  if (queued == nullptr) return Status(StatusCode::kNoSpace, "no memory for the job");
  {
    const std::lock_guard lock(mutex_);
    Pieces& counts = counts_[index_of(lane)];
    if (closing_) return Status(StatusCode::kClosed, "the lanes are closed");
    if (counts.waiting >= queue_limit_ && !beyond_limit)
      return Status(StatusCode::kQueueFull, "the lane is full",
                    static_cast<std::int64_t>(counts.waiting), queue_limit_);
    KVSTRATA_RETURN_IF_ERROR(start_threads(pieces));
    queued->job = std::move(job);
    counts.waiting += pieces;
    waiting_ += pieces;
    queues_[index_of(lane)].push(queued.release());
  }
  if (pieces > 1)
    changed_.notify_all();
  else
    changed_.notify_one();
  return Status();
}

void LaneGroup::stop() noexcept {
  bool idle_already = false;
  {
    const std::lock_guard lock(mutex_);
    idle_already = !closing_ && present_ == 0;
    closing_ = true;
  }
  changed_.notify_all();
  if (idle_already) done_->signal();
}

bool LaneGroup::busy() noexcept {
  const std::lock_guard lock(mutex_);
  return waiting_ > 0 || std::any_of(counts_.begin(), counts_.end(),
                                     [](const Pieces& counts) { return counts.running > 0; });
}

bool LaneGroup::idle() noexcept {
  const std::lock_guard lock(mutex_);
  return closing_ && present_ == 0;
}

void LaneGroup::join() noexcept {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

// Starts threads, up to the limit, for the waiting pieces and `more`. Fails only if the group has
// no thread at all. REQUIRES: mutex_ is held.
Status LaneGroup::start_threads(std::size_t more) noexcept {
  std::size_t missing = waiting_ + more > idle_ ? waiting_ + more - idle_ : 0;
  missing = std::min<std::size_t>(missing, workers_ - threads_.size());
  if (missing == 0) return Status();
  try {
    for (; missing > 0; --missing) {
      threads_.push_back(start_thread([this] { work(); }));
      present_ += 1;
      name_thread(threads_.back(), name_.substr(0, 12) + "-" + std::to_string(threads_.size() - 1));
    }
  } catch (const std::system_error& error) {
    if (threads_.empty())
      return Status(StatusCode::kOsError, "a thread cannot be started", error.code().value());
  } catch (const std::bad_alloc&) {
    if (threads_.empty()) return Status(StatusCode::kNoSpace, "no memory for a thread");
  }
  return Status();
}

// Takes the next piece that may run, by precedence of the lanes. Returns its job and sets `*piece`,
// or returns nullptr. REQUIRES: mutex_ is held.
QueuedJob* LaneGroup::take(std::size_t* piece) noexcept {
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    QueuedJob* queued = queues_[lane].first();
    if (queued == nullptr) continue;
    if (lane == index_of(Lane::kPut) && counts_[lane].running >= max_puts_) continue;
    *piece = queued->next_piece++;
    if (queued->next_piece == queued->pieces) queues_[lane].pop();
    counts_[lane].waiting -= 1;
    counts_[lane].running += 1;
    waiting_ -= 1;
    return queued;
  }
  return nullptr;
}

void LaneGroup::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::size_t piece = 0;
    QueuedJob* queued = take(&piece);
    if (queued == nullptr) {
      if (closing_ && waiting_ == 0) break;
      idle_ += 1;
      changed_.wait(lock);
      idle_ -= 1;
      continue;
    }
    const Lane lane = queued->lane;
    lock.unlock();
    queued->job->run(piece);
    lock.lock();
    const bool last = --queued->left == 0;
    if (last) {
      lock.unlock();
      queued->job->end();
      lock.lock();
    }
    counts_[index_of(lane)].running -= 1;
    // Wakes threads that may now take a put (see max_puts_), or that may now leave.
    if (lane == Lane::kPut || closing_) changed_.notify_all();
    if (last) done_->push(queued);  // after the counts, so that a reader sees the job as ended
  }
  present_ -= 1;
  if (present_ == 0) done_->signal();
}

}  // namespace kvstrata
