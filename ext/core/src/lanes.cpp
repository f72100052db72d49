// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "kvstrata/lanes.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace kvstrata {

namespace {

constexpr std::size_t index_of(Lane lane) noexcept {
  return static_cast<std::size_t>(lane);
}

// A job on its way. Made at submit, so that no thread of a lane ever needs memory.
struct Node {
  std::unique_ptr<LaneJob> job;
  Lane lane;
  std::size_t pieces;
  std::size_t next_piece = 0;  // not taken yet: [next_piece, pieces)
  std::size_t left;            // not ended yet
  Node* next = nullptr;
};

// First in, first out. Owns its nodes.
class NodeQueue {
 public:
  NodeQueue() noexcept = default;
  NodeQueue(const NodeQueue&) = delete;
  NodeQueue& operator=(const NodeQueue&) = delete;
  ~NodeQueue() {
    while (first_ != nullptr)
      delete pop();
  }

  [[nodiscard]] Node* first() const noexcept { return first_; }

  void push(Node* node) noexcept {
    node->next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = node;
    last_ = node;
  }

  // REQUIRES: not empty.
  Node* pop() noexcept {
    Node* node = first_;
    first_ = node->next;
    return node;
  }

 private:
  Node* first_ = nullptr;
  Node* last_ = nullptr;
};

// Jobs that are done and not read, of all groups.
class Done {
 public:
  ~Done() {
    if (event_fd >= 0) ::close(event_fd);
  }

  void push(Node* node) noexcept {
    {
      const std::lock_guard lock(mutex_);
      queue_.push(node);
      counts_[index_of(node->lane)] += 1;
      n_unread_ += 1;
    }
    signal();
  }

  void signal() const noexcept {
    const std::uint64_t one = 1;
    // Fails only when the counter is at its limit, and then the descriptor is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(event_fd, &one, sizeof one);
  }

  Status take(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
    out->clear();
    const std::lock_guard lock(mutex_);
    try {
      out->reserve(n_unread_);
    } catch (const std::bad_alloc&) {
      return Status(StatusCode::kNoSpace, "no memory for the jobs that are done");
    }
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(event_fd, &count, sizeof count);
    for (; n_unread_ > 0; --n_unread_) {
      const std::unique_ptr<Node> node(queue_.pop());
      out->push_back(std::move(node->job));
    }
    return Status();
  }

  std::uint64_t count(Lane lane) noexcept {
    const std::lock_guard lock(mutex_);
    return counts_[index_of(lane)];
  }

  int event_fd = -1;

 private:
  std::mutex mutex_;
  NodeQueue queue_;
  std::size_t n_unread_ = 0;
  std::array<std::uint64_t, kLaneCount> counts_{};
};

// Threads that serve the queues of some lanes.
class Group {
 public:
  Group(std::string name, std::uint32_t workers, bool serves_many, std::uint32_t queue_limit,
        Done* done)
      : name_(std::move(name)),
        workers_(workers),
        max_puts_(serves_many && workers > 1 ? workers - 1 : workers),
        queue_limit_(queue_limit),
        done_(done) {
    threads_.reserve(workers);
  }

  Status submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept {
    const std::size_t pieces = job->pieces();
    std::unique_ptr<Node> node(
        new (std::nothrow) Node{.job = nullptr, .lane = lane, .pieces = pieces, .left = pieces});
    if (node == nullptr) return Status(StatusCode::kNoSpace, "no memory for the job");
    {
      const std::lock_guard lock(mutex_);
      LaneCounts& counts = counts_[index_of(lane)];
      if (closing_) return Status(StatusCode::kClosed, "the lanes are closed");
      if (counts.waiting >= queue_limit_ && !beyond_limit) {
        counts.refused += 1;
        return Status(StatusCode::kQueueFull, "the lane is full",
                      static_cast<std::int64_t>(counts.waiting), queue_limit_);
      }
      KVSTRATA_RETURN_IF_ERROR(start_threads(pieces));
      node->job = std::move(job);
      counts.waiting += pieces;
      waiting_ += pieces;
      queues_[index_of(lane)].push(node.release());
    }
    if (pieces > 1)
      changed_.notify_all();
    else
      changed_.notify_one();
    return Status();
  }

  LaneCounts counts(Lane lane) noexcept {
    const std::lock_guard lock(mutex_);
    return counts_[index_of(lane)];
  }

  void stop() noexcept {
    bool idle_already = false;
    {
      const std::lock_guard lock(mutex_);
      idle_already = !closing_ && present_ == 0;
      closing_ = true;
    }
    changed_.notify_all();
    if (idle_already) done_->signal();
  }

  bool busy() noexcept {
    const std::lock_guard lock(mutex_);
    return waiting_ > 0 || std::any_of(counts_.begin(), counts_.end(),
                                       [](const LaneCounts& counts) { return counts.running > 0; });
  }

  bool idle() noexcept {
    const std::lock_guard lock(mutex_);
    return closing_ && present_ == 0;
  }

  void join() noexcept {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
  }

 private:
  // REQUIRES: mutex_. Enough threads for `more` pieces beside those that wait; fails only when
  // there is none at all.
  Status start_threads(std::size_t more) noexcept {
    std::size_t missing = waiting_ + more > idle_ ? waiting_ + more - idle_ : 0;
    missing = std::min<std::size_t>(missing, workers_ - threads_.size());
    if (missing == 0) return Status();
    // Signals are for the threads of the application.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Status status;
    try {
      for (; missing > 0; --missing) {
        threads_.emplace_back([this] { work(); });
        present_ += 1;
        const std::string name = name_.substr(0, 12) + "-" + std::to_string(threads_.size() - 1);
        pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
      }
    } catch (const std::system_error& error) {
      if (threads_.empty())
        status = Status(StatusCode::kOsError, "a thread cannot be started", error.code().value());
    } catch (const std::bad_alloc&) {
      if (threads_.empty()) status = Status(StatusCode::kNoSpace, "no memory for a thread");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return status;
  }

  // REQUIRES: mutex_. The job whose next piece may run now, by precedence of its lane.
  Node* take(std::size_t* piece) noexcept {
    for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
      Node* node = queues_[lane].first();
      if (node == nullptr) continue;
      if (lane == index_of(Lane::kPut) && counts_[lane].running >= max_puts_) continue;
      *piece = node->next_piece++;
      if (node->next_piece == node->pieces) queues_[lane].pop();
      counts_[lane].waiting -= 1;
      counts_[lane].running += 1;
      waiting_ -= 1;
      return node;
    }
    return nullptr;
  }

  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      std::size_t piece = 0;
      Node* node = take(&piece);
      if (node == nullptr) {
        if (closing_ && waiting_ == 0) break;
        idle_ += 1;
        changed_.wait(lock);
        idle_ -= 1;
        continue;
      }
      const Lane lane = node->lane;
      lock.unlock();
      node->job->run(piece);
      lock.lock();
      const bool last = --node->left == 0;
      if (last) {
        lock.unlock();
        node->job->end();
        lock.lock();
      }
      counts_[index_of(lane)].running -= 1;
      // A put that had to wait for this one may be next, and who closes waits for the last piece.
      if (lane == Lane::kPut || closing_) changed_.notify_all();
      if (last) done_->push(node);  // whoever reads it finds it counted as ended
    }
    present_ -= 1;
    if (present_ == 0) done_->signal();
  }

  const std::string name_;
  const std::size_t workers_;
  const std::size_t max_puts_;
  const std::uint64_t queue_limit_;
  Done* const done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<NodeQueue, kLaneCount> queues_;
  std::array<LaneCounts, kLaneCount> counts_{};  // `done` is counted by Done
  std::size_t waiting_ = 0;
  std::size_t idle_ = 0;
  std::size_t present_ = 0;  // threads that have not left
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

class Lanes::Impl {
 public:
  explicit Impl(const LaneOptions& options) : owner(getpid()) {
    std::array<std::uint32_t, kLaneCount> own = options.own_workers;
    if (options.common_workers == 1 && own[index_of(Lane::kLookup)] == 0)
      own[index_of(Lane::kLookup)] = 1;
    Group* common = nullptr;
    constexpr const char* kNames[kLaneCount] = {"lookup", "load", "delete", "put"};
    const auto served = std::count(own.begin(), own.end(), 0U);
    for (std::size_t lane = 0; lane < kLaneCount; ++lane) {
      if (own[lane] == 0 && common != nullptr) {
        by_lane[lane] = common;
        continue;
      }
      const bool shared = own[lane] == 0;
      const std::string name = options.name + "-" + (shared ? "all" : kNames[lane]);
      groups.push_back(std::make_unique<Group>(name, shared ? options.common_workers : own[lane],
                                               shared && served > 1, options.queue_limit, &done));
      by_lane[lane] = groups.back().get();
      if (shared) common = by_lane[lane];
    }
  }

  const pid_t owner;
  Done done;
  std::vector<std::unique_ptr<Group>> groups;
  std::array<Group*, kLaneCount> by_lane{};
};

Lanes::Lanes(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

Lanes::~Lanes() {
  if (impl_->owner != getpid()) {
    (void)impl_.release();  // a forked child has none of the threads, and the mutexes may be held
    return;
  }
  close();
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
  try {
    auto impl = std::make_unique<Impl>(options);
    impl->done.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (impl->done.event_fd < 0)
      return Status(StatusCode::kOsError, "eventfd: cannot create", errno);
    out->reset(new Lanes(std::move(impl)));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the lanes");
  }
  return Status();
}

int Lanes::event_fd() const noexcept {
  return impl_->done.event_fd;
}

Status Lanes::submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept {
  return impl_->by_lane[index_of(lane)]->submit(lane, job, beyond_limit);
}

Status Lanes::take_done(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
  return impl_->done.take(out);
}

LaneCounts Lanes::counts(Lane lane) const noexcept {
  LaneCounts counts = impl_->by_lane[index_of(lane)]->counts(lane);
  counts.done = impl_->done.count(lane);
  return counts;
}

void Lanes::stop() noexcept {
  for (const auto& group : impl_->groups)
    group->stop();
}

bool Lanes::idle() const noexcept {
  return std::all_of(impl_->groups.begin(), impl_->groups.end(),
                     [](const auto& group) { return group->idle(); });
}

void Lanes::abandon(std::unique_ptr<Lanes> lanes) noexcept {
  if (lanes == nullptr) return;
  lanes->stop();
  const auto& groups = lanes->impl_->groups;
  if (lanes->impl_->owner == getpid() &&
      std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->busy(); }))
    (void)lanes.release();
}

void Lanes::close() noexcept {
  stop();
  for (const auto& group : impl_->groups)
    group->join();
}

}  // namespace kvstrata
