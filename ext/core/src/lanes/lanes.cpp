// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/lanes.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/event_fd.h"
#include "base/threads.h"

namespace kvstrata {

namespace {

constexpr std::size_t index_of(Lane lane) noexcept {
  return static_cast<std::size_t>(lane);
}

struct QueuedJob {
  std::unique_ptr<LaneJob> job;
  Lane lane;
  std::size_t pieces;
  std::size_t next_piece = 0;  // the first piece that no thread has begun
  std::size_t left;            // pieces that have not ended
};
// A job's node is made when the job is submitted and moves from list to list, so that the threads
// of a lane never have to allocate.
using Jobs = std::list<QueuedJob>;

}  // namespace

// The jobs of all groups that are done and not read yet, in the order in which they ended.
// Thread-safe. No other lock is taken inside its mutex, which a thread may take while it has the
// mutex of a group.
class DoneJobs {
 public:
  // Called before anything else; see EventFd::open().
  Status open() noexcept { return event_.open(); }
  [[nodiscard]] int event_fd() const noexcept { return event_.fd(); }

  void take_over(Jobs& from, Jobs::iterator job) noexcept {
    {
      const std::lock_guard lock(mutex_);
      jobs_.splice(jobs_.end(), from, job);
    }
    signal();
  }
  // Makes event_fd() readable although no job is new, because the last thread of a group has left.
  void signal() const noexcept { event_.signal(); }
  // See Lanes::take_done().
  void take(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
    out->clear();
    const std::lock_guard lock(mutex_);
    out->reserve(jobs_.size());
    event_.drain();
    for (QueuedJob& done : jobs_)
      out->push_back(std::move(done.job));
    jobs_.clear();
  }

 private:
  EventFd event_;
  std::mutex mutex_;
  Jobs jobs_;
};

// LaneGroup: threads that serve the queues of one or more lanes. Thread-safe.
//
// Lock order: mutex_, then the mutex of DoneJobs. No lock is held while a job runs or ends, because
// a job may drop holds, which takes other locks.
class LaneGroup {
 public:
  // `done` must outlive the group. `serves_many`: the group serves more than one lane.
  LaneGroup(std::string name, std::uint32_t workers, bool serves_many, std::uint32_t queue_limit,
            DoneJobs* done);

  // See Lanes::submit().
  Status submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept;
  // See Lanes::stop().
  void stop() noexcept;
  // True while pieces are waiting or running.
  [[nodiscard]] bool busy() noexcept;
  // True once stop() was called and all threads have left.
  [[nodiscard]] bool idle() noexcept;
  // Waits for all accepted jobs and joins the threads. Idempotent. REQUIRES: stop() was called.
  void join() noexcept;

 private:
  struct Pieces {
    std::uint64_t waiting = 0;  // no thread has begun them
    std::uint64_t running = 0;
  };

  Status start_threads(std::size_t more) noexcept;
  std::optional<Jobs::iterator> take(std::size_t* piece) noexcept;
  void work();

  const std::string name_;
  const std::size_t workers_;
  const std::size_t max_puts_;  // pieces of puts that may run at the same time
  const std::uint64_t queue_limit_;
  DoneJobs* const done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Jobs, kLaneCount> queues_;  // jobs of which a piece waits
  Jobs begun_;                           // jobs whose last pieces run
  std::array<Pieces, kLaneCount> counts_{};
  std::size_t waiting_ = 0;  // pieces that no thread has begun, of all lanes
  std::size_t idle_ = 0;     // threads that wait for work
  std::size_t present_ = 0;  // threads that have not left
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

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
  Jobs queued;
  queued.push_back({.job = nullptr, .lane = lane, .pieces = pieces, .left = pieces});
  {
    const std::lock_guard lock(mutex_);
    Pieces& counts = counts_[index_of(lane)];
    if (closing_) return Status(StatusCode::kClosed, "the lanes are closed");
    if (counts.waiting >= queue_limit_ && !beyond_limit)
      return Status(StatusCode::kQueueFull, "the lane is full",
                    static_cast<std::int64_t>(counts.waiting), queue_limit_);
    KVSTRATA_RETURN_IF_ERROR(start_threads(pieces));
    queued.front().job = std::move(job);
    counts.waiting += pieces;
    waiting_ += pieces;
    Jobs& queue = queues_[index_of(lane)];
    queue.splice(queue.end(), queued);
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
  }
  return Status();
}

// Takes the next piece that may run, by precedence of the lanes. Returns its job and sets `*piece`,
// or returns nothing. REQUIRES: mutex_ is held.
std::optional<Jobs::iterator> LaneGroup::take(std::size_t* piece) noexcept {
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (queues_[lane].empty()) continue;
    if (lane == index_of(Lane::kPut) && counts_[lane].running >= max_puts_) continue;
    const Jobs::iterator queued = queues_[lane].begin();
    *piece = queued->next_piece++;
    if (queued->next_piece == queued->pieces) begun_.splice(begun_.end(), queues_[lane], queued);
    counts_[lane].waiting -= 1;
    counts_[lane].running += 1;
    waiting_ -= 1;
    return queued;
  }
  return std::nullopt;
}

void LaneGroup::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::size_t piece = 0;
    const std::optional<Jobs::iterator> taken = take(&piece);
    if (!taken.has_value()) {
      if (closing_ && waiting_ == 0) break;
      idle_ += 1;
      changed_.wait(lock);
      idle_ -= 1;
      continue;
    }
    QueuedJob* const queued = &**taken;
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
    if (last)
      done_->take_over(begun_, *taken);  // after the counts, so that a reader sees the job as ended
  }
  present_ -= 1;
  if (present_ == 0) done_->signal();
}

Lanes::Lanes(const LaneOptions& options) : owner_(getpid()), done_(std::make_unique<DoneJobs>()) {
  std::array<std::uint32_t, kLaneCount> own = options.own_workers;
  if (options.common_workers == 1 && own[index_of(Lane::kLookup)] == 0)
    own[index_of(Lane::kLookup)] = 1;
  LaneGroup* common = nullptr;
  constexpr const char* kNames[kLaneCount] = {"lookup", "load", "delete", "put"};
  const auto served = std::count(own.begin(), own.end(), 0U);
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (own[lane] == 0 && common != nullptr) {
      by_lane_[lane] = common;
      continue;
    }
    const bool shared = own[lane] == 0;
    const std::string name = options.name + "-" + (shared ? "all" : kNames[lane]);
    groups_.push_back(std::make_unique<LaneGroup>(name, shared ? options.common_workers : own[lane],
                                                  shared && served > 1, options.queue_limit,
                                                  done_.get()));
    by_lane_[lane] = groups_.back().get();
    if (shared) common = by_lane_[lane];
  }
}

Lanes::~Lanes() {
  if (owner_ == getpid()) {
    close();
    return;
  }
  // A forked child has none of the threads, and a mutex may be locked for ever: leak the groups.
  for (std::unique_ptr<LaneGroup>& group : groups_)
    (void)group.release();
  (void)done_.release();
}

Status Lanes::create(const LaneOptions& options, std::unique_ptr<Lanes>* out) noexcept {
  if (options.common_workers == 0 || options.common_workers > kMaxWorkers) {
    return Status(StatusCode::kBadArgument, "num_workers: must be between 1 and 256",
                  options.common_workers, kMaxWorkers);
  }
  for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
    if (options.own_workers[lane] > kMaxWorkers) {
      return Status(StatusCode::kBadArgument, "per_op_workers: must be between 1 and 256",
                    options.own_workers[lane], kMaxWorkers, static_cast<std::int64_t>(lane));
    }
  }
  if (options.queue_limit == 0 || options.queue_limit > kMaxQueue) {
    return Status(StatusCode::kBadArgument, "queue_limit: must be between 1 and 1048576",
                  options.queue_limit, kMaxQueue);
  }
  std::unique_ptr<Lanes> lanes(new Lanes(options));
  KVSTRATA_RETURN_IF_ERROR(lanes->done_->open());
  *out = std::move(lanes);
  return Status();
}

int Lanes::event_fd() const noexcept {
  return done_->event_fd();
}

Status Lanes::submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept {
  return by_lane_[index_of(lane)]->submit(lane, job, beyond_limit);
}

void Lanes::take_done(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
  done_->take(out);
}

void Lanes::stop() noexcept {
  for (const auto& group : groups_)
    group->stop();
}

bool Lanes::idle() const noexcept {
  return std::all_of(groups_.begin(), groups_.end(),
                     [](const auto& group) { return group->idle(); });
}

void Lanes::abandon(std::unique_ptr<Lanes> lanes) noexcept {
  if (lanes == nullptr) return;
  lanes->stop();
  const auto& groups = lanes->groups_;
  if (lanes->owner_ == getpid() &&
      std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->busy(); }))
    (void)lanes.release();
}

void Lanes::close() noexcept {
  stop();
  for (const auto& group : groups_)
    group->join();
}

}  // namespace kvstrata
