// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/copy_engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>

namespace kvstrata {

CopyOutcome copy_outcome(const Status& status) noexcept {
  switch (status.code()) {
    case StatusCode::kOk:
      return CopyOutcome::kOk;
    case StatusCode::kStale:
      return CopyOutcome::kStale;
    case StatusCode::kIncompatible:
      return CopyOutcome::kMismatch;
    case StatusCode::kBusy:
      return CopyOutcome::kUnverified;
    case StatusCode::kNoSpace:
      return CopyOutcome::kFailed;
    // kOutOfRange: the extent ends before the record does.
    default:
      return CopyOutcome::kCorrupt;
  }
}

Status check_items(CopyKind kind, const CopyPlan& plan, std::span<const CopyItem> items) noexcept {
  if (items.empty() || items.size() > CopyEngine::kMaxItems) {
    return Status(StatusCode::kBadArgument, "items: must have between 1 and 65536 entries",
                  static_cast<std::int64_t>(items.size()), CopyEngine::kMaxItems, -1);
  }
  const auto check = [&](const CopyItem& item) -> Status {
    std::uint64_t needed = 0;
    KVSTRATA_RETURN_IF_ERROR(plan.record_bytes(item.blocks.size(), &needed));
    KVSTRATA_RETURN_IF_ERROR(plan.check_blocks(item.blocks, kind == CopyKind::kScatter));
    KVSTRATA_RETURN_IF_ERROR(check_record_address(item.record));
    if (item.length < needed) {
      return Status(StatusCode::kBadArgument, "extent_len: too small for the record",
                    static_cast<std::int64_t>(item.length), static_cast<std::int64_t>(needed));
    }
    return Status();
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (const Status status = check(items[i]); !status.ok()) {
      return Status(status.code(), status.message(), status.detail(0), status.detail(1),
                    static_cast<std::int64_t>(i));
    }
  }
  return Status();
}

std::size_t unit_end(const CopyPlan& plan, std::uint64_t n_blocks, std::size_t begin) noexcept {
  const std::uint64_t limit = plan.section_offset(begin, n_blocks) + CopyEngine::kUnitBytes;
  std::size_t end = begin + 1;
  while (end < plan.section_count() && plan.section_offset(end + 1, n_blocks) <= limit) {
    ++end;
  }
  return end;
}

namespace {

// What the threads know of one item while it runs.
struct Progress {
  std::atomic<std::uint32_t> units_left{0};
  // The worst outcome so far, as (section + 1) << 8 | outcome; 0 is ok. The smallest section wins.
  std::atomic<std::uint64_t> bad{0};
  std::vector<Section> sections;  // gather: the table being filled
};

struct Job {
  std::uint64_t id = 0;
  CopyKind kind = CopyKind::kGather;
  bool reported = false;  // its end goes to completions()
  std::shared_ptr<const CopyPlan> plan;
  std::vector<CopyItem> items;
  std::unique_ptr<Progress[]> progress;
  std::vector<CopyResult> results;
  std::vector<std::size_t> unit_begins;  // sections; of every item, and where the last unit ends
  // Guarded by the engine's mutex.
  std::size_t next_unit = 0;
  std::size_t end_unit = 0;    // smaller than all units once the job was cancelled
  std::size_t units_left = 0;  // not executed yet, of [0, end_unit)
  bool done = false;

  [[nodiscard]] std::size_t units_per_item() const noexcept { return unit_begins.size() - 1; }
  [[nodiscard]] bool all_taken() const noexcept { return next_unit == end_unit; }
};

struct Unit {
  std::size_t item;
  std::size_t begin;  // sections
  std::size_t end;
};

std::uint64_t encode(CopyOutcome outcome, std::int64_t section) noexcept {
  return (static_cast<std::uint64_t>(section + 1) << 8) | static_cast<std::uint64_t>(outcome);
}

void note(std::atomic<std::uint64_t>& bad, CopyOutcome outcome, std::int64_t section) noexcept {
  const std::uint64_t mine = encode(outcome, section);
  std::uint64_t seen = bad.load(std::memory_order_relaxed);
  while ((seen == 0 || mine < seen) &&
         !bad.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
  }
}

Status make_job(CopyKind kind, std::shared_ptr<const CopyPlan> plan, std::vector<CopyItem> items,
                std::shared_ptr<Job>* out) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_items(kind, *plan, items));
  std::size_t most_blocks = 0;
  for (const CopyItem& item : items) {
    most_blocks = std::max(most_blocks, item.blocks.size());
  }
  try {
    auto job = std::make_shared<Job>();
    const std::size_t sections = plan->section_count();
    job->kind = kind;
    job->unit_begins.push_back(0);
    while (job->unit_begins.back() != sections) {
      job->unit_begins.push_back(unit_end(*plan, most_blocks, job->unit_begins.back()));
    }
    job->progress = std::make_unique<Progress[]>(items.size());
    job->results.resize(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      job->progress[i].units_left.store(static_cast<std::uint32_t>(job->units_per_item()),
                                        std::memory_order_relaxed);
      if (kind == CopyKind::kGather) {
        job->progress[i].sections.resize(sections);
      }
    }
    job->plan = std::move(plan);
    job->items = std::move(items);
    job->end_unit = job->items.size() * job->units_per_item();
    job->units_left = job->end_unit;
    *out = std::move(job);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "items: no memory for the job", 0, 0, -1);
  }
  return Status();
}

Unit take_unit(Job& job) noexcept {
  const std::size_t unit = job.next_unit++;
  const std::size_t index = unit % job.units_per_item();
  return Unit{unit / job.units_per_item(), job.unit_begins[index], job.unit_begins[index + 1]};
}

void execute(Job& job, const Unit& unit) noexcept {
  const CopyPlan& plan = *job.plan;
  const CopyItem& item = job.items[unit.item];
  Progress& progress = job.progress[unit.item];
  const std::size_t count = unit.end - unit.begin;
  auto* const payload = static_cast<unsigned char*>(item.record) +
                        record_header_bytes(static_cast<std::uint32_t>(plan.section_count()));

  const std::unique_ptr<std::uint32_t[]> crcs(new (std::nothrow) std::uint32_t[2 * count]);
  if (crcs == nullptr) {
    note(progress.bad, CopyOutcome::kFailed, -1);
  } else if (job.kind == CopyKind::kGather) {
    // Several units may do this; the header is only written after the last one.
    invalidate_record(item.record);
    plan.gather(item.blocks, payload, unit.begin, unit.end, crcs.get());
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t s = unit.begin + i;
      progress.sections[s] = Section{0, plan.section_bytes(s, item.blocks.size()), crcs[i]};
    }
  } else if (progress.bad.load(std::memory_order_relaxed) == 0) {
    std::uint32_t* const expected = crcs.get() + count;
    const Status status =
        check_record_for_scatter(plan, item.blocks.size(), item.record, item.length, item.spec.key,
                                 unit.begin, unit.end, expected);
    if (!status.ok()) {
      note(progress.bad, copy_outcome(status), -1);
    } else {
      plan.scatter(item.blocks, payload, unit.begin, unit.end, crcs.get());
      for (std::size_t i = 0; i < count; ++i) {
        if (crcs[i] != expected[i]) {
          note(progress.bad, CopyOutcome::kCorrupt, static_cast<std::int64_t>(unit.begin + i));
          break;
        }
      }
    }
  }

  if (progress.units_left.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  CopyResult& result = job.results[unit.item];
  const std::uint64_t bad = progress.bad.load(std::memory_order_relaxed);
  if (bad != 0) {
    result.outcome = static_cast<CopyOutcome>(bad & 0xff);
    result.section = static_cast<std::int32_t>(bad >> 8) - 1;
  } else if (job.kind == CopyKind::kGather) {
    const Status status = write_record_header(item.record, item.length, item.spec,
                                              progress.sections.data(), progress.sections.size());
    result.outcome = status.ok() ? CopyOutcome::kOk : CopyOutcome::kFailed;
  }
}

}  // namespace

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

  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
  // Whether this process started the threads, or is a forked child of it.
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  Impl() = default;
  void work() noexcept;
  // REQUIRES, for both: mutex_ is held.
  bool cancel_rest(const std::shared_ptr<Job>& job) noexcept;
  void finish(const std::shared_ptr<Job>& job) noexcept;
  void signal() noexcept;

  std::mutex mutex_;
  std::condition_variable work_;            // units to take, or closing
  std::condition_variable done_;            // a job ended
  std::deque<std::shared_ptr<Job>> queue_;  // jobs with units that nobody has taken
  std::unordered_map<std::uint64_t, std::shared_ptr<Job>>
      unread_;                               // submitted, completion not read
  std::vector<std::shared_ptr<Job>> ended_;  // done, completion not read; at most capacity_
  std::size_t capacity_ = 0;
  std::size_t active_ = 0;  // jobs accepted (run() included) and not done
  bool closing_ = false;
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;
  int event_fd_ = -1;
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
    engine->capacity_ = queue;
    engine->ended_.reserve(queue);
    engine->event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->event_fd_ < 0) {
      return Status(StatusCode::kOsError, "eventfd: cannot create", errno);
    }
    // Signals are for the threads of the application.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Status status;
    try {
      for (int i = 0; i < threads; ++i) {
        engine->threads_.emplace_back(&Impl::work, engine.get());
#if defined(__linux__)
        pthread_setname_np(engine->threads_.back().native_handle(),
                           ("kv-copy-" + std::to_string(i)).c_str());
#endif
      }
    } catch (const std::system_error& error) {
      status = Status(StatusCode::kOsError, "threads: cannot start", error.code().value());
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    KVSTRATA_RETURN_IF_ERROR(status);
    *out = std::move(engine);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the engine");
  }
  return Status();
}

CopyEngine::Impl::~Impl() {
  close();
  if (event_fd_ >= 0) {
    ::close(event_fd_);
  }
}

void CopyEngine::Impl::signal() noexcept {
  const std::uint64_t one = 1;
  // Fails only when the counter is at its limit, and then the descriptor is readable anyway.
  [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
}

void CopyEngine::Impl::finish(const std::shared_ptr<Job>& job) noexcept {
  job->done = true;
  --active_;
  if (job->reported) {
    ended_.push_back(job);
    signal();
  }
  done_.notify_all();
}

void CopyEngine::Impl::work() noexcept {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    const std::shared_ptr<Job> job = queue_.front();
    const Unit unit = take_unit(*job);
    if (job->all_taken()) {
      queue_.pop_front();
    }
    lock.unlock();
    execute(*job, unit);
    lock.lock();
    if (--job->units_left == 0) {
      finish(job);
    }
  }
}

Status CopyEngine::Impl::submit(std::uint64_t job_id, CopyKind kind,
                                std::shared_ptr<const CopyPlan> plan,
                                std::vector<CopyItem> items) noexcept {
  std::shared_ptr<Job> job;
  KVSTRATA_RETURN_IF_ERROR(make_job(kind, std::move(plan), std::move(items), &job));
  job->id = job_id;
  job->reported = true;
  try {
    const Lock lock(mutex_);
    if (closing_) {
      return Status(StatusCode::kClosed, "the copy engine is closed", 0, 0, -1);
    }
    if (threads_.empty()) {
      return Status(StatusCode::kBadArgument, "threads: an engine without threads can only run()",
                    0, 0, -1);
    }
    if (unread_.size() >= capacity_) {
      return Status(StatusCode::kQueueFull, "queue: full", static_cast<std::int64_t>(capacity_));
    }
    if (!unread_.try_emplace(job_id, job).second) {
      return Status(StatusCode::kExists, "job_id: a job of this id is not read yet",
                    static_cast<std::int64_t>(job_id), 0, -1);
    }
    try {
      queue_.push_back(job);
    } catch (const std::bad_alloc&) {
      unread_.erase(job_id);
      throw;
    }
    ++active_;
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
    out->reserve(ended_.size());
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the completions");
  }
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t taken = ::read(event_fd_, &count, sizeof count);
  for (const std::shared_ptr<Job>& job : ended_) {
    out->push_back(CopyCompletion{job->id, std::move(job->results)});
    unread_.erase(job->id);
  }
  ended_.clear();
  return Status();
}

Status CopyEngine::Impl::run(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                             std::vector<CopyItem> items,
                             std::vector<CopyResult>* results) noexcept {
  std::shared_ptr<Job> job;
  KVSTRATA_RETURN_IF_ERROR(make_job(kind, std::move(plan), std::move(items), &job));
  Lock lock(mutex_);
  if (closing_) {
    return Status(StatusCode::kClosed, "the copy engine is closed", 0, 0, -1);
  }
  const bool shared = !threads_.empty() && job->end_unit > 1;
  if (shared) {
    try {
      queue_.push_front(job);
    } catch (const std::bad_alloc&) {
      return Status(StatusCode::kNoSpace, "items: no memory for the job", 0, 0, -1);
    }
    work_.notify_all();
  }
  ++active_;
  while (!job->all_taken()) {
    const Unit unit = take_unit(*job);
    if (shared && job->all_taken()) {
      queue_.erase(std::find(queue_.begin(), queue_.end(), job));
    }
    lock.unlock();
    execute(*job, unit);
    lock.lock();
    --job->units_left;
  }
  if (job->units_left == 0) {
    if (!job->done) {
      finish(job);
    }
  } else {
    done_.wait(lock, [&] { return job->done; });
  }
  *results = std::move(job->results);
  return Status();
}

bool CopyEngine::Impl::wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) noexcept {
  // A deadline beyond the clock's range is no deadline.
  constexpr auto kLongest = std::chrono::hours(24 * 365);
  const auto deadline =
      std::chrono::steady_clock::now() + std::min<std::chrono::nanoseconds>(timeout, kLongest);
  Lock lock(mutex_);
  const auto found = unread_.find(job_id);
  if (found == unread_.end()) {
    return true;
  }
  const std::shared_ptr<Job> job = found->second;
  return done_.wait_until(lock, deadline, [&] { return job->done; });
}

bool CopyEngine::Impl::cancel_rest(const std::shared_ptr<Job>& job) noexcept {
  const std::size_t begun = (job->next_unit + job->units_per_item() - 1) / job->units_per_item();
  const std::size_t items = job->end_unit / job->units_per_item();
  if (begun == items) {
    return false;
  }
  std::fill(job->results.begin() + static_cast<std::ptrdiff_t>(begun),
            job->results.begin() + static_cast<std::ptrdiff_t>(items),
            CopyResult{CopyOutcome::kCancelled, -1});
  job->units_left -= (items - begun) * job->units_per_item();
  job->end_unit = begun * job->units_per_item();
  if (job->all_taken()) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), job));
  }
  if (job->units_left == 0) {
    finish(job);
  }
  return true;
}

bool CopyEngine::Impl::cancel(std::uint64_t job_id) noexcept {
  const Lock lock(mutex_);
  const auto found = unread_.find(job_id);
  return found != unread_.end() && cancel_rest(found->second);
}

void CopyEngine::Impl::drain() noexcept {
  Lock lock(mutex_);
  done_.wait(lock, [this] { return active_ == 0; });
}

void CopyEngine::Impl::close() noexcept {
  const std::lock_guard<std::mutex> closing(close_mutex_);
  {
    Lock lock(mutex_);
    closing_ = true;
    for (const auto& [id, job] : unread_) {
      static_cast<void>(cancel_rest(job));
    }
    work_.notify_all();
    done_.wait(lock, [this] { return active_ == 0; });
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
}

CopyEngine::CopyEngine(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

CopyEngine::~CopyEngine() {
  if (!impl_->owned()) {
    // A forked child has the state without its threads: there is nothing to join, the lock may be
    // held for ever, and a condition variable with waiters cannot be destroyed. It is left behind.
    static_cast<void>(impl_.release());
  }
}

Status CopyEngine::create(int threads, std::size_t queue,
                          std::unique_ptr<CopyEngine>* out) noexcept {
  std::unique_ptr<Impl> impl;
  KVSTRATA_RETURN_IF_ERROR(Impl::create(threads, queue, &impl));
  out->reset(new (std::nothrow) CopyEngine(std::move(impl)));
  return *out != nullptr ? Status() : Status(StatusCode::kNoSpace, "no memory for the engine");
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
  impl_->close();
}

}  // namespace kvstrata
