// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/threads.h"
#include "copy/job.h"
#include "copy/job_ledger.h"

namespace kvstrata {

class CopyEngine::Impl {
 public:
  static Status create(int threads, std::size_t queue, std::unique_ptr<Impl>* out) noexcept;
  ~Impl();
  Status submit(std::uint64_t job_id, CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                std::vector<CopyItem> items) noexcept;
  Status completions(std::vector<CopyCompletion>* out) noexcept;
  Status run(CopyKind kind, std::shared_ptr<const CopyPlan> plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results) noexcept;
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) noexcept;
  bool cancel(std::uint64_t job_id) noexcept;
  void drain() noexcept;
  void close() noexcept;

  [[nodiscard]] int event_fd() const noexcept { return ledger_.event_fd(); }
  // Whether this process created the copy engine; false in a forked child, which has no threads.
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Impl() = default;
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
  pid_t owner_ = 0;
};

Status CopyEngine::Impl::create(int threads, std::size_t queue,
                                std::unique_ptr<Impl>* out) noexcept {
  if (threads < 0 || threads > kMaxThreads) {
    return Status(StatusCode::kBadArgument, "threads: must be between 0 and 64", threads,
                  kMaxThreads);
  }
  if (queue == 0 || queue > kMaxQueue) {
    return Status(StatusCode::kBadArgument, "queue: must be between 1 and 65536",
                  static_cast<std::int64_t>(queue), kMaxQueue);
  }
  try {
    std::unique_ptr<Impl> engine(new Impl);
    engine->owner_ = getpid();
    KVSTRATA_RETURN_IF_ERROR(engine->ledger_.open(queue));
    try {
      for (int i = 0; i < threads; ++i) {
        engine->threads_.push_back(start_thread(&Impl::work, engine.get()));
        name_thread(engine->threads_.back(), "kv-copy-" + std::to_string(i));
      }
    } catch (const std::system_error& error) {
      return Status(StatusCode::kOsError, "threads: cannot start", error.code().value());
    }
    *out = std::move(engine);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the copy engine");
  }
  return Status();
}

CopyEngine::Impl::~Impl() {
  close();
}

void CopyEngine::Impl::finish(const std::shared_ptr<CopyJob>& job) noexcept {
  ledger_.end(job);
  done_.notify_all();
}

void CopyEngine::Impl::work() noexcept {
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

Status CopyEngine::Impl::submit(std::uint64_t job_id, CopyKind kind,
                                std::shared_ptr<const CopyPlan> plan,
                                std::vector<CopyItem> items) noexcept {
  std::shared_ptr<CopyJob> job;
  KVSTRATA_RETURN_IF_ERROR(CopyJob::create(kind, std::move(plan), std::move(items), &job));
  job->id = job_id;
  job->reported = true;
  try {
    const Lock lock(mutex_);
    KVSTRATA_RETURN_IF_ERROR(ledger_.check_open());
    if (threads_.empty()) {
      return Status(StatusCode::kBadArgument,
                    "threads: a copy engine without threads can only run()", 0, 0, -1);
    }
    KVSTRATA_RETURN_IF_ERROR(ledger_.accept(job));
    try {
      queue_.push_back(job);
    } catch (const std::bad_alloc&) {
      ledger_.withdraw(*job);
      throw;
    }
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "items: no memory for the job", 0, 0, -1);
  }
  work_.notify_all();
  return Status();
}

Status CopyEngine::Impl::completions(std::vector<CopyCompletion>* out) noexcept {
  const Lock lock(mutex_);
  out->clear();
  try {
    out->reserve(ledger_.ended().size());
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the completions");
  }
  for (const std::shared_ptr<CopyJob>& job : ledger_.ended()) {
    out->push_back(CopyCompletion{job->id, job->take_results()});
  }
  ledger_.forget_ended();
  return Status();
}

Status CopyEngine::Impl::run(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                             std::vector<CopyItem> items,
                             std::vector<CopyResult>* results) noexcept {
  std::shared_ptr<CopyJob> job;
  KVSTRATA_RETURN_IF_ERROR(CopyJob::create(kind, std::move(plan), std::move(items), &job));
  Lock lock(mutex_);
  KVSTRATA_RETURN_IF_ERROR(ledger_.check_open());
  const bool shared = !threads_.empty() && job->has_several_units();
  if (shared) {
    try {
      queue_.push_front(job);
    } catch (const std::bad_alloc&) {
      return Status(StatusCode::kNoSpace, "items: no memory for the job", 0, 0, -1);
    }
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
  *results = job->take_results();
  return Status();
}

bool CopyEngine::Impl::wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) noexcept {
  const auto deadline = deadline_after(timeout);
  Lock lock(mutex_);
  const std::shared_ptr<CopyJob> job = ledger_.find(job_id);
  return job == nullptr || done_.wait_until(lock, deadline, [&] { return job->done; });
}

bool CopyEngine::Impl::cancel_rest(const std::shared_ptr<CopyJob>& job) noexcept {
  if (!job->cancel_rest()) return false;
  if (job->all_taken()) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), job));
  }
  if (job->all_ended()) {
    finish(job);
  }
  return true;
}

bool CopyEngine::Impl::cancel(std::uint64_t job_id) noexcept {
  const Lock lock(mutex_);
  const std::shared_ptr<CopyJob> job = ledger_.find(job_id);
  return job != nullptr && cancel_rest(job);
}

void CopyEngine::Impl::drain() noexcept {
  Lock lock(mutex_);
  done_.wait(lock, [this] { return ledger_.idle(); });
}

void CopyEngine::Impl::close() noexcept {
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

CopyEngine::CopyEngine(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

CopyEngine::~CopyEngine() {
  if (!impl_->owned()) {
    // A forked child has the state but not the threads: it has no thread to join, the mutex may be
    // locked for ever, and a condition variable with waiters cannot be destroyed. So all is leaked.
    static_cast<void>(impl_.release());
  }
}

Status CopyEngine::create(int threads, std::size_t queue,
                          std::unique_ptr<CopyEngine>* out) noexcept {
  std::unique_ptr<Impl> impl;
  KVSTRATA_RETURN_IF_ERROR(Impl::create(threads, queue, &impl));
  out->reset(new (std::nothrow) CopyEngine(std::move(impl)));
  return *out != nullptr ? Status() : Status(StatusCode::kNoSpace, "no memory for the copy engine");
}

int CopyEngine::event_fd() const noexcept {
  return impl_->event_fd();
}

Status CopyEngine::submit(std::uint64_t job_id, CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                          std::vector<CopyItem> items) noexcept {
  return impl_->submit(job_id, kind, std::move(plan), std::move(items));
}

Status CopyEngine::completions(std::vector<CopyCompletion>* out) noexcept {
  return impl_->completions(out);
}

Status CopyEngine::run(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::vector<CopyResult>* results) noexcept {
  return impl_->run(kind, std::move(plan), std::move(items), results);
}

bool CopyEngine::wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) noexcept {
  return impl_->wait(job_id, timeout);
}

bool CopyEngine::cancel(std::uint64_t job_id) noexcept {
  return impl_->cancel(job_id);
}

void CopyEngine::drain() noexcept {
  impl_->drain();
}

void CopyEngine::close() noexcept {
  if (impl_->owned()) impl_->close();
}

}  // namespace kvstrata
