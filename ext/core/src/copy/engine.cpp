// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/engine.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace kvstrata {

Status CopyEngine::create(int threads, std::size_t queue,
                          std::shared_ptr<CopyEngine>* out) noexcept {
  if (threads < 0 || threads > kMaxThreads) {
    return Status(StatusCode::kBadArgument, "threads: must be between 0 and 64", threads,
                  kMaxThreads);
  }
  if (queue == 0 || queue > kMaxQueue) {
    return Status(StatusCode::kBadArgument, "queue: must be between 1 and 65536",
                  static_cast<std::int64_t>(queue), kMaxQueue);
  }
  // In a forked child the mutex may be locked for ever, and a condition variable with waiters
  // cannot be destroyed.
  std::shared_ptr<CopyEngine> engine(new CopyEngine, [](CopyEngine* made) {
    if (made->owned()) delete made;
  });
  KVSTRATA_RETURN_IF_ERROR(engine->ledger_.open(queue));
  try {
    for (int i = 0; i < threads; ++i) {
      engine->threads_.push_back(start_thread(&CopyEngine::work, engine.get()));
      name_thread(engine->threads_.back(), "kv-copy-" + std::to_string(i));
    }
  } catch (const std::system_error& error) {
    return Status(StatusCode::kOsError, "threads: cannot start", error.code().value());
  }
  *out = std::move(engine);
  return Status();
}

CopyEngine::~CopyEngine() {
  close();
}

void CopyEngine::finish(const std::shared_ptr<CopyJob>& job) noexcept {
  ledger_.end(job);
  done_.notify_all();
}

void CopyEngine::work() noexcept {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return ledger_.closed() || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    const std::shared_ptr<CopyJob> job = queue_.front();
    const CopyJob::Unit unit = job->take_unit();
    if (job->all_taken()) {
      queue_.pop_front();
    }
    lock.unlock();
    job->execute(unit);
    lock.lock();
    job->end_unit();
    if (job->all_ended()) {
      finish(job);
    }
  }
}

Status CopyEngine::submit(std::uint64_t job_id, CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                          std::vector<CopyItem> items) noexcept {
  std::shared_ptr<CopyJob> job;
  KVSTRATA_RETURN_IF_ERROR(CopyJob::create(kind, std::move(plan), std::move(items), &job));
  job->id = job_id;
  job->reported = true;
  {
    const Lock lock(mutex_);
    KVSTRATA_RETURN_IF_ERROR(ledger_.check_open());
    if (threads_.empty()) {
      return Status(StatusCode::kBadArgument,
                    "threads: a copy engine without threads can only run()", 0, 0, -1);
    }
    KVSTRATA_RETURN_IF_ERROR(ledger_.accept(job));
    queue_.push_back(job);
  }
  work_.notify_all();
  return Status();
}

void CopyEngine::completions(std::vector<CopyCompletion>* out) noexcept {
  const Lock lock(mutex_);
  out->clear();
  for (const std::shared_ptr<CopyJob>& job : ledger_.ended()) {
    out->push_back(CopyCompletion{job->id, job->take_outcomes()});
  }
  ledger_.forget_ended();
}

Status CopyEngine::run(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::vector<CopyOutcome>* outcomes) noexcept {
  std::shared_ptr<CopyJob> job;
  KVSTRATA_RETURN_IF_ERROR(CopyJob::create(kind, std::move(plan), std::move(items), &job));
  Lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(ledger_.check_open());
  const bool shared = !threads_.empty() && job->has_several_units();
  if (shared) {
    queue_.push_front(job);
    work_.notify_all();
  }
  const Status accepted = ledger_.accept(job);  // cannot fail: the job is not reported
  assert(accepted.ok());
  while (!job->all_taken()) {
    const CopyJob::Unit unit = job->take_unit();
    if (shared && job->all_taken()) {
      queue_.erase(std::find(queue_.begin(), queue_.end(), job));
    }
    lock.unlock();
    job->execute(unit);
    lock.lock();
    job->end_unit();
  }
  if (job->all_ended()) {
    if (!job->done) {
      finish(job);
    }
  } else {
    done_.wait(lock, [&] { return job->done; });
  }
  *outcomes = job->take_outcomes();
  return Status();
}

bool CopyEngine::cancel_rest(const std::shared_ptr<CopyJob>& job) noexcept {
  if (!job->cancel_rest()) return false;
  if (job->all_taken()) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), job));
  }
  if (job->all_ended()) {
    finish(job);
  }
  return true;
}

bool CopyEngine::cancel(std::uint64_t job_id) noexcept {
  const Lock lock(mutex_);
  const std::shared_ptr<CopyJob> job = ledger_.find(job_id);
  return job != nullptr && cancel_rest(job);
}

void CopyEngine::close() noexcept {
  if (!owned()) return;
  const std::lock_guard<std::mutex> closing(close_mutex_);
  {
    Lock lock(mutex_);
    ledger_.close();
    for (const auto& [id, job] : ledger_.unread()) {
      static_cast<void>(cancel_rest(job));
    }
    work_.notify_all();
    done_.wait(lock, [this] { return ledger_.idle(); });
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
}

}  // namespace kvstrata
