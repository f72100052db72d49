// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/engine.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <string>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace kvstrata {

// One job as units of work. A unit is some sections of one item, so that several threads can share
// a large record; the thread that ends the last unit of an item finishes the item.
//
//   units   [0, next)     taken, in order
//           [next, end)   to be taken; a cancellation makes `end` smaller
//
// REQUIRES, for all calls but create() and execute(): the copy engine's mutex is held.
class CopyJob {
 public:
  struct Unit {
    std::size_t item;
    std::size_t begin;  // sections
    std::size_t end;
  };

  // kBadArgument, kOutOfRange: see check_items().
  static Status create(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::shared_ptr<CopyJob>* out) noexcept;

  // For JobLedger.
  std::uint64_t id = 0;
  bool reported = false;
  bool done = false;

  [[nodiscard]] bool all_taken() const noexcept { return next_unit_ == end_unit_; }
  [[nodiscard]] bool has_several_units() const noexcept { return end_unit_ > 1; }
  // True if all units have been executed, except those that were cancelled.
  [[nodiscard]] bool all_ended() const noexcept { return units_left_ == 0; }

  // REQUIRES: not all_taken().
  [[nodiscard]] Unit take_unit() noexcept;
  // Copies a unit. Called without the mutex, by several threads for different units.
  void execute(const Unit& unit) noexcept;
  // Called once for each unit that was executed.
  void end_unit() noexcept { --units_left_; }

  // Cancels the items of which no unit was taken. Returns false if there are none.
  bool cancel_rest() noexcept;

  // REQUIRES: all_ended(); called once.
  [[nodiscard]] std::vector<CopyOutcome> take_outcomes() noexcept { return std::move(outcomes_); }

 private:
  // The state of one item while its units run.
  struct Progress {
    std::atomic<std::uint32_t> units_left{0};
    std::atomic<CopyOutcome> outcome{CopyOutcome::kOk};  // the first failure that a unit met
    std::vector<Section> sections;  // gather: the section table, filled by the units
  };

  [[nodiscard]] std::size_t units_per_item() const noexcept { return unit_begins_.size() - 1; }

  CopyKind kind_ = CopyKind::kGather;
  std::shared_ptr<const CopyPlan> plan_;
  std::vector<CopyItem> items_;
  std::unique_ptr<Progress[]> progress_;
  std::vector<CopyOutcome> outcomes_;
  std::vector<std::size_t> unit_begins_;  // first section of each unit of an item, then the end
  std::size_t next_unit_ = 0;
  std::size_t end_unit_ = 0;
  std::size_t units_left_ = 0;  // units of [0, end_unit_) that have not been executed
};

Status CopyJob::create(CopyKind kind, std::shared_ptr<const CopyPlan> plan,
                       std::vector<CopyItem> items, std::shared_ptr<CopyJob>* out) noexcept {
  KVSTRATA_RETURN_IF_ERROR(check_items(kind, *plan, items));
  std::size_t most_blocks = 0;
  for (const CopyItem& item : items) {
    most_blocks = std::max(most_blocks, item.blocks.size());
  }
  auto job = std::make_shared<CopyJob>();
  const std::size_t sections = plan->section_count();
  job->kind_ = kind;
  job->unit_begins_.push_back(0);
  while (job->unit_begins_.back() != sections) {
    job->unit_begins_.push_back(unit_end(*plan, most_blocks, job->unit_begins_.back()));
  }
  job->progress_ = std::make_unique<Progress[]>(items.size());
  job->outcomes_.resize(items.size(), CopyOutcome::kOk);
  for (std::size_t i = 0; i < items.size(); ++i) {
    job->progress_[i].units_left.store(static_cast<std::uint32_t>(job->units_per_item()),
                                       std::memory_order_relaxed);
    if (kind == CopyKind::kGather) {
      job->progress_[i].sections.resize(sections);
    }
  }
  job->plan_ = std::move(plan);
  job->items_ = std::move(items);
  job->end_unit_ = job->items_.size() * job->units_per_item();
  job->units_left_ = job->end_unit_;
  *out = std::move(job);
  return Status();
}

CopyJob::Unit CopyJob::take_unit() noexcept {
  const std::size_t unit = next_unit_++;
  const std::size_t index = unit % units_per_item();
  return Unit{unit / units_per_item(), unit_begins_[index], unit_begins_[index + 1]};
}

void CopyJob::execute(const Unit& unit) noexcept {
  const CopyPlan& plan = *plan_;
  const CopyItem& item = items_[unit.item];
  Progress& progress = progress_[unit.item];
  const std::size_t count = unit.end - unit.begin;
  auto* const payload = static_cast<unsigned char*>(item.record) +
                        record_header_bytes(static_cast<std::uint32_t>(plan.section_count()));

  const auto crcs = std::make_unique_for_overwrite<std::uint32_t[]>(2 * count);
  if (kind_ == CopyKind::kGather) {
    // Any unit of the item may be the first to write, so each one invalidates the record; the last
    // unit to end writes the header.
    invalidate_record(item.record);
    plan.gather(item.blocks, payload, unit.begin, unit.end, crcs.get());
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t s = unit.begin + i;
      progress.sections[s] = Section{0, plan.section_bytes(s, item.blocks.size()), crcs[i]};
    }
  } else if (progress.outcome.load(std::memory_order_relaxed) == CopyOutcome::kOk) {
    std::uint32_t* const expected = crcs.get() + count;
    const Status status =
        check_record_for_scatter(plan, item.blocks.size(), item.record, item.length, item.spec,
                                 unit.begin, unit.end, expected);
    CopyOutcome outcome = copy_outcome(status);
    if (status.ok()) {
      plan.scatter(item.blocks, payload, unit.begin, unit.end, crcs.get());
      if (!std::equal(crcs.get(), expected, expected)) outcome = CopyOutcome::kCorrupt;
    }
    CopyOutcome none = CopyOutcome::kOk;
    progress.outcome.compare_exchange_strong(none, outcome, std::memory_order_relaxed);
  }

  if (progress.units_left.fetch_sub(1, std::memory_order_acq_rel) != 1) {
    return;
  }
  CopyOutcome& outcome = outcomes_[unit.item];
  outcome = progress.outcome.load(std::memory_order_relaxed);
  if (kind_ == CopyKind::kGather) {
    const Status status = write_record_header(item.record, item.length, item.spec,
                                              progress.sections.data(), progress.sections.size());
    if (!status.ok()) outcome = CopyOutcome::kFailed;
  }
}

bool CopyJob::cancel_rest() noexcept {
  const std::size_t begun = (next_unit_ + units_per_item() - 1) / units_per_item();
  const std::size_t items = end_unit_ / units_per_item();
  if (begun == items) {
    return false;
  }
  std::fill(outcomes_.begin() + static_cast<std::ptrdiff_t>(begun),
            outcomes_.begin() + static_cast<std::ptrdiff_t>(items), CopyOutcome::kCancelled);
  units_left_ -= (items - begun) * units_per_item();
  end_unit_ = begun * units_per_item();
  return true;
}

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
