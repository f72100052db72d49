// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy_engine.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

namespace kvstrata::cuda {
namespace {

// Bytes of a direction that have begun and not ended, at most, unless one item alone has more: what
// has begun cannot be cancelled.
constexpr std::uint64_t kAheadBytes = 128 << 20;

// What the threads know of one item.
struct Progress {
  // Guarded by the engine's mutex.
  std::size_t parts_left = 0;  // units of checksums, and one for the device
  CopyResult result;
  bool device_failed = false;
  // Of the section table: a gather fills it, a scatter compares with it.
  std::vector<Section> sections;
  std::vector<std::uint32_t> expected;
};

struct Job {
  std::uint64_t id = 0;
  CopyKind kind = CopyKind::kGather;
  bool reported = false;  // its end goes to completions()
  CudaPlan plan;
  std::vector<CopyItem> items;
  std::vector<Progress> progress;
  // Guarded by the engine's mutex.
  std::size_t next_item = 0;
  std::size_t end_item = 0;    // smaller than all items once the job was cancelled
  std::size_t items_left = 0;  // not ended yet
  bool moment_awaited = false;
  bool lost = false;  // cancelled, or an error of CUDA: nobody may count on its sections
  bool done = false;
  // After which a section is in place: one for each of a layerwise job, else one for all.
  std::vector<std::shared_ptr<Moment>> sections_queued;

  [[nodiscard]] bool layerwise() const noexcept {
    return plan.layerwise && kind == CopyKind::kScatter;
  }
  [[nodiscard]] unsigned char* payload(std::size_t item) const noexcept {
    const auto sections = static_cast<std::uint32_t>(plan.copy->section_count());
    return static_cast<unsigned char*>(items[item].record) + record_header_bytes(sections);
  }
  [[nodiscard]] std::uint64_t payload_bytes(std::size_t item) const noexcept {
    return plan.copy->section_offset(plan.copy->section_count(), items[item].blocks.size());
  }
};

// Whether a rounded section could be rounded; true where there are no scales.
bool all_scales(const unsigned char* scales, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t scale = 0;
    std::memcpy(&scale, scales + at, sizeof scale);
    if (!fp8::is_scale(scale)) return false;
  }
  return true;
}

// Checksums of sections [begin, end) of one item.
struct Unit {
  std::shared_ptr<Job> job;
  std::size_t item;
  std::size_t begin;
  std::size_t end;
};

// Items whose copies are queued; they have ended when `moment` has come.
struct Begun {
  std::shared_ptr<Job> job;
  std::vector<std::size_t> items;
  std::shared_ptr<Moment> moment;
  std::uint64_t bytes = 0;
};

}  // namespace

class CudaCopyEngine::Impl {
 public:
  static Failure create(std::shared_ptr<Device> device, const EngineOptions& options,
                        Status* status, std::unique_ptr<Impl>* out);
  ~Impl();

  Status start(std::uint64_t job_id, bool reported, CopyKind kind, CudaPlan plan,
               std::vector<CopyItem> items, std::shared_ptr<Job>* out);
  void completions(std::vector<CopyCompletion>* out);
  // Whether the engine can take a plan with a rounding.
  [[nodiscard]] Status check_rounding(const CopyPlan& plan, std::span<const CopyItem> items) const;
  Status run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
             std::vector<CopyResult>* results);
  bool wait(std::uint64_t job_id, std::chrono::nanoseconds timeout);
  bool cancel(std::uint64_t job_id);
  void drain();
  void close();
  Failure choose(const CopyPlan& plan, std::span<const std::uint32_t> blocks, std::uint64_t host,
                 std::uint64_t host_bytes);
  Failure moment(Stream stream, std::shared_ptr<Moment>* out);
  Failure await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                        std::chrono::nanoseconds timeout, bool* queued);

  [[nodiscard]] Choice choice() const {
    const std::lock_guard lock(mutex_);
    return choice_;
  }
  [[nodiscard]] Failure failed() const {
    const std::lock_guard lock(mutex_);
    return failed_;
  }
  [[nodiscard]] int event_fd() const noexcept { return event_fd_; }
  [[nodiscard]] bool owned() const noexcept { return owner_ == getpid(); }
  PinnedMemory& pinned() noexcept { return pinned_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  // One direction.
  struct Lane {
    Lane(std::shared_ptr<Device> device, unsigned max_sms) : mover(std::move(device), max_sms) {}
    Mover mover;
    std::deque<std::shared_ptr<Job>> queue;  // jobs with items that have not begun
    std::deque<Begun> begun;                 // in the order of the stream
    std::uint64_t ahead_bytes = 0;           // of begun
    std::condition_variable queued;          // work for the submitting thread
    std::condition_variable came;            // work for the finishing thread
    bool submitting = true;                  // the submitting thread runs
  };

  Impl() = default;
  void submit_items(Lane& lane);
  void finish_items(Lane& lane);
  void help();
  // Queues what [first, last) of the job's items need; called without the lock.
  void begin(Lane& lane, const std::shared_ptr<Job>& job, std::size_t first, std::size_t last);
  Failure queue_copies(Lane& lane, Job& job, Way way, const std::vector<std::size_t>& items);
  void compute(const Unit& unit);
  // REQUIRES, for all below: mutex_ is held.
  void add_units(const std::shared_ptr<Job>& job, std::size_t item);
  void end_part(Lock& lock, Job& job, std::size_t item);
  void end_item(Job& job, std::size_t item);
  void finish(Job& job);
  bool cancel_rest(Lane& lane, const std::shared_ptr<Job>& job, CopyOutcome outcome);
  void fail(const Failure& failure);
  Lane& lane_of(CopyKind kind) { return *lanes_[static_cast<std::size_t>(kind)]; }

  std::shared_ptr<Device> device_;
  EngineOptions options_;
  PinnedMemory pinned_;
  mutable std::mutex mutex_;
  std::array<std::unique_ptr<Lane>, 2> lanes_;
  std::condition_variable work_;      // units, or closing
  std::condition_variable progress_;  // a job ended, a section was queued
  std::deque<Unit> units_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Job>> unread_;
  std::vector<std::shared_ptr<Job>> ended_;
  std::size_t active_ = 0;  // jobs accepted and not done
  bool closing_ = false;
  Choice choice_;
  Failure failed_;
  std::mutex close_mutex_;
  std::mutex choose_mutex_;
  std::vector<std::thread> threads_;
  int event_fd_ = -1;
  pid_t owner_ = 0;
};

Failure CudaCopyEngine::Impl::create(std::shared_ptr<Device> device, const EngineOptions& options,
                                     Status* status, std::unique_ptr<Impl>* out) {
  const auto limit = [&](const char* text, std::uint64_t value, std::uint64_t most) {
    *status = Status(StatusCode::kBadArgument, text, static_cast<std::int64_t>(value),
                     static_cast<std::int64_t>(most));
    return Failure{};
  };
  if (options.threads < 1 || options.threads > CopyEngine::kMaxThreads) {
    return limit("threads: must be between 1 and 64", static_cast<std::uint64_t>(options.threads),
                 CopyEngine::kMaxThreads);
  }
  if (options.queue == 0 || options.queue > CopyEngine::kMaxQueue) {
    return limit("queue: must be between 1 and 65536", options.queue, CopyEngine::kMaxQueue);
  }
  if (options.max_sms == 0 || options.max_sms > 1024) {
    return limit("max_sms: must be between 1 and 1024", options.max_sms, 1024);
  }
  Choice choice;
  if (Failure failure = first_choice(*device, options, &choice)) return failure;
  std::unique_ptr<Impl> engine(new Impl);
  engine->owner_ = getpid();
  engine->device_ = device;
  engine->options_ = options;
  engine->ended_.reserve(options.queue);
  const CurrentContext current(*device);
  if (Failure failure = current.failure()) return failure;
  for (const CopyKind kind : {CopyKind::kGather, CopyKind::kScatter}) {
    auto& lane = engine->lanes_[static_cast<std::size_t>(kind)];
    lane = std::make_unique<Lane>(device, options.max_sms);
    if (Failure failure = lane->mover.open(kind == CopyKind::kScatter)) return failure;
    if (choice.way != Way::kStaged && !options.rounds) continue;
    if (const Failure failure = lane->mover.reserve(options.staging_bytes)) {
      if (options.rounds) {
        return Failure{-1, "", "staging_bytes: " + device->driver().explain(failure)};
      }
      choice.way = Way::kDma;
      choice.reason = "not staged: " + device->driver().explain(failure);
      for (const auto& other : engine->lanes_) {
        if (other != nullptr) other->mover.give_back();
      }
    }
  }
  engine->choice_ = std::move(choice);
  engine->event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (engine->event_fd_ < 0) {
    *status = Status(StatusCode::kOsError, "eventfd: cannot create", errno);
    return Failure{};
  }
  // Signals are for the threads of the application.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto thread = [&](const char* name, auto work) {
    engine->threads_.emplace_back(work);
    pthread_setname_np(engine->threads_.back().native_handle(), name);
  };
  Impl* const self = engine.get();
  Lane& store = engine->lane_of(CopyKind::kGather);
  Lane& load = engine->lane_of(CopyKind::kScatter);
  try {
    for (int i = 0; i < options.threads; ++i) {
      thread("kv-gpu-crc", [self] { self->help(); });
    }
    thread("kv-gpu-store", [self, &store] { self->submit_items(store); });
    thread("kv-gpu-stored", [self, &store] { self->finish_items(store); });
    thread("kv-gpu-load", [self, &load] { self->submit_items(load); });
    thread("kv-gpu-loaded", [self, &load] { self->finish_items(load); });
  } catch (const std::system_error& error) {
    *status = Status(StatusCode::kOsError, "threads: cannot start", error.code().value());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (status->ok()) *out = std::move(engine);
  return Failure{};
}

CudaCopyEngine::Impl::~Impl() {
  close();
  if (event_fd_ >= 0) ::close(event_fd_);
}

Status CudaCopyEngine::Impl::start(std::uint64_t job_id, bool reported, CopyKind kind,
                                   CudaPlan plan, std::vector<CopyItem> items,
                                   std::shared_ptr<Job>* out) {
  if (plan.device != device_) {
    return Status(StatusCode::kBadArgument, "plan: is for another device than the engine",
                  plan.device->ordinal(), device_->ordinal(), -1);
  }
  KVSTRATA_RETURN_IF_ERROR(check_items(kind, *plan.copy, items));
  if (plan.copy->rounding()) {
    KVSTRATA_RETURN_IF_ERROR(check_rounding(*plan.copy, items));
  }
  auto job = std::make_shared<Job>();
  job->id = job_id;
  job->reported = reported;
  job->kind = kind;
  job->plan = std::move(plan);
  job->items = std::move(items);
  job->progress.resize(job->items.size());
  job->end_item = job->items_left = job->items.size();
  const Lock lock(mutex_);
  if (closing_) {
    return Status(StatusCode::kClosed, "the copy engine is closed", 0, 0, -1);
  }
  if (reported) {
    if (unread_.size() >= options_.queue) {
      return Status(StatusCode::kQueueFull, "queue: full",
                    static_cast<std::int64_t>(options_.queue));
    }
    if (!unread_.try_emplace(job_id, job).second) {
      return Status(StatusCode::kExists, "job_id: a job of this id is not read yet",
                    static_cast<std::int64_t>(job_id), 0, -1);
    }
  }
  ++active_;
  Lane& lane = lane_of(kind);
  lane.queue.push_back(job);
  if (failed_) {
    cancel_rest(lane, job, CopyOutcome::kFailed);
  } else {
    lane.queued.notify_all();
  }
  *out = std::move(job);
  return Status();
}

Status CudaCopyEngine::Impl::check_rounding(const CopyPlan& plan,
                                            std::span<const CopyItem> items) const {
  if (!options_.rounds) {
    return Status(StatusCode::kBadArgument, "plan: rounds KV, and the engine was not made for that",
                  0, 0, -1);
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!lanes_[0]->mover.cannot_round(plan, items[i].blocks.size()).empty()) {
      return Status(StatusCode::kBadArgument,
                    "block_ids: a rounded section is larger than the staging buffer",
                    static_cast<std::int64_t>(items[i].blocks.size()), 0,
                    static_cast<std::int64_t>(i));
    }
  }
  return Status();
}

void CudaCopyEngine::Impl::finish(Job& job) {
  job.done = true;
  --active_;
  if (job.reported) {
    ended_.push_back(unread_.at(job.id));
    const std::uint64_t one = 1;
    // Fails only when the counter is at its limit, and then the descriptor is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(event_fd_, &one, sizeof one);
  }
  progress_.notify_all();
}

void CudaCopyEngine::Impl::end_item(Job& job, std::size_t item) {
  Progress& progress = job.progress[item];
  if (progress.device_failed) progress.result = CopyResult{CopyOutcome::kFailed, -1};
  if (--job.items_left == 0) finish(job);
}

bool CudaCopyEngine::Impl::cancel_rest(Lane& lane, const std::shared_ptr<Job>& job,
                                       CopyOutcome outcome) {
  if (job->next_item == job->end_item) return false;
  std::erase(lane.queue, job);
  job->lost = true;
  const std::size_t end = std::exchange(job->end_item, job->next_item);
  for (std::size_t i = job->next_item; i < end; ++i) {
    job->progress[i].result = CopyResult{outcome, -1};
    end_item(*job, i);
  }
  progress_.notify_all();
  return true;
}

void CudaCopyEngine::Impl::fail(const Failure& failure) {
  if (failed_) return;
  failed_ = failure;
  for (const auto& lane : lanes_) {
    while (!lane->queue.empty()) {
      const std::shared_ptr<Job> job = lane->queue.front();
      cancel_rest(*lane, job, CopyOutcome::kFailed);
    }
  }
}

void CudaCopyEngine::Impl::submit_items(Lane& lane) {
  const CurrentContext current(*device_);
  Lock lock(mutex_);
  for (;;) {
    lane.queued.wait(lock, [&] {
      return (closing_ && lane.queue.empty()) ||
             (!lane.queue.empty() && (lane.begun.empty() || lane.ahead_bytes < kAheadBytes));
    });
    if (lane.queue.empty()) break;
    const std::shared_ptr<Job> job = lane.queue.front();
    const std::size_t first = job->next_item;
    job->next_item = job->layerwise() ? job->end_item : first + 1;
    const std::size_t last = job->next_item;
    if (last == job->end_item) lane.queue.pop_front();
    lock.unlock();
    begin(lane, job, first, last);
    lock.lock();
  }
  lane.submitting = false;
  lane.came.notify_all();
}

void CudaCopyEngine::Impl::begin(Lane& lane, const std::shared_ptr<Job>& job, std::size_t first,
                                 std::size_t last) {
  const CopyPlan& plan = *job->plan.copy;
  const std::size_t count = plan.section_count();
  Begun begun{job, {}, nullptr, 0};
  std::vector<std::size_t> bad;
  for (std::size_t i = first; i < last; ++i) {
    CopyItem& item = job->items[i];
    Progress& progress = job->progress[i];
    if (job->kind == CopyKind::kGather) {
      invalidate_record(item.record);
      for (std::size_t s = 0; s < count; ++s)
        progress.sections.push_back(Section{0, plan.section_bytes(s, item.blocks.size()), 0});
    } else {
      progress.expected.resize(count);
      const Status status =
          check_record_for_scatter(plan, item.blocks.size(), item.record, item.length,
                                   item.spec.key, 0, count, progress.expected.data());
      if (!status.ok()) {
        progress.result = CopyResult{copy_outcome(status), -1};
        bad.push_back(i);
        continue;
      }
    }
    begun.items.push_back(i);
    begun.bytes += job->payload_bytes(i);
  }
  Way way = Way::kDma;
  Failure failure;
  {
    Lock lock(mutex_);
    way = choice_.way;
    failure = failed_;
    for (const std::size_t i : begun.items) {
      job->progress[i].parts_left = 1;  // the device's
      if (job->kind == CopyKind::kScatter) add_units(job, i);
    }
    for (const std::size_t i : bad) {
      end_item(*job, i);
    }
  }
  if (!failure) failure = queue_copies(lane, *job, way, begun.items);
  // Whatever was queued before a failure still runs, so the items end with an event all the same.
  Failure unsettled = device_->take_event(&begun.moment);
  if (!unsettled) unsettled = begun.moment->record(lane.mover.stream());
  if (unsettled) {
    begun.moment = nullptr;
    if (Failure lost = Device::check("cuStreamSynchronize",
                                     device_->driver().stream_synchronize(lane.mover.stream()))) {
      unsettled = lost;
      const Lock lock(mutex_);
      fail(lost);
    }
    if (!failure) failure = unsettled;
  }
  const Lock lock(mutex_);
  if (failure) {
    job->lost = true;
    for (const std::size_t i : begun.items)
      job->progress[i].device_failed = true;
    if (is_sticky(failure.number)) fail(failure);
  } else if (!job->layerwise() && last == job->items.size()) {
    job->sections_queued.push_back(begun.moment);
  }
  progress_.notify_all();
  if (begun.items.empty()) return;
  lane.ahead_bytes += begun.bytes;
  lane.begun.push_back(std::move(begun));
  lane.came.notify_all();
}

Failure CudaCopyEngine::Impl::queue_copies(Lane& lane, Job& job, Way way,
                                           const std::vector<std::size_t>& items) {
  Mover& mover = lane.mover;
  const CopyPlan& plan = *job.plan.copy;
  const std::size_t count = plan.section_count();
  if (job.plan.behind && !job.moment_awaited) {
    if (Failure failure = job.plan.behind->make_wait(mover.stream())) return failure;
    job.moment_awaited = true;
  }
  std::vector<Pinning> pinnings;
  for (const std::size_t i : items) {
    const auto payload = reinterpret_cast<std::uint64_t>(job.payload(i));
    pinnings.push_back(pinned_.find(payload, job.payload_bytes(i)));
  }
  const auto queue = [&](std::size_t begin, std::size_t end) -> Failure {
    for (std::size_t n = 0; n < items.size(); ++n) {
      const std::size_t i = items[n];
      if (Failure failure = mover.queue(way, job.kind, plan, job.items[i].blocks,
                                        reinterpret_cast<std::uint64_t>(job.payload(i)),
                                        pinnings[n], begin, end)) {
        mover.forget();
        return failure;
      }
    }
    return mover.flush();
  };
  if (!job.layerwise()) return queue(0, count);
  for (std::size_t s = 0; s < count; ++s) {
    if (Failure failure = queue(s, s + 1)) return failure;
    std::shared_ptr<Moment> moment;
    if (Failure failure = device_->take_event(&moment)) return failure;
    if (Failure failure = moment->record(mover.stream())) return failure;
    const Lock lock(mutex_);
    job.sections_queued.push_back(std::move(moment));
    progress_.notify_all();
  }
  return Failure{};
}

void CudaCopyEngine::Impl::finish_items(Lane& lane) {
  const CurrentContext current(*device_);
  Lock lock(mutex_);
  for (;;) {
    lane.came.wait(lock, [&] { return !lane.begun.empty() || !lane.submitting; });
    if (lane.begun.empty()) return;
    // It stays in the list while the thread waits for it: it is still ahead.
    const Begun& begun = lane.begun.front();
    const std::shared_ptr<Job> job = begun.job;
    const std::shared_ptr<Moment> moment = begun.moment;
    const bool gone = is_sticky(failed_.number);
    Failure failure;
    if (moment != nullptr && !gone) {
      lock.unlock();
      failure = moment->wait();
      lock.lock();
      // Whatever the error is, nobody can tell any more when a copy of this stream has ended.
      if (failure) fail(failure);
    }
    if (gone || failure) {
      job->lost = true;
      for (const std::size_t i : begun.items)
        job->progress[i].device_failed = true;
    }
    const std::vector<std::size_t> items = std::move(lane.begun.front().items);
    lane.ahead_bytes -= begun.bytes;
    lane.begun.pop_front();
    lane.queued.notify_all();
    for (const std::size_t i : items) {
      if (job->kind == CopyKind::kGather && !job->progress[i].device_failed) {
        add_units(job, i);
      }
      end_part(lock, *job, i);
    }
  }
}

void CudaCopyEngine::Impl::add_units(const std::shared_ptr<Job>& job, std::size_t item) {
  const CopyPlan& plan = *job->plan.copy;
  for (std::size_t s = 0; s < plan.section_count(); s = units_.back().end) {
    units_.push_back(Unit{job, item, s, unit_end(plan, job->items[item].blocks.size(), s)});
    ++job->progress[item].parts_left;
  }
  work_.notify_all();
}

void CudaCopyEngine::Impl::help() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return !units_.empty() || (closing_ && active_ == 0); });
    if (units_.empty()) return;
    const Unit unit = std::move(units_.front());
    units_.pop_front();
    lock.unlock();
    compute(unit);
    lock.lock();
    end_part(lock, *unit.job, unit.item);
  }
}

void CudaCopyEngine::Impl::compute(const Unit& unit) {
  Job& job = *unit.job;
  Progress& progress = job.progress[unit.item];
  const CopyPlan& plan = *job.plan.copy;
  const std::size_t n_blocks = job.items[unit.item].blocks.size();
  const unsigned char* const payload = job.payload(unit.item);
  std::size_t s = unit.begin;
  for (; s < unit.end; ++s) {
    const unsigned char* const section = payload + plan.section_offset(s, n_blocks);
    const std::uint32_t crc = crc32c(section, plan.section_bytes(s, n_blocks));
    if (job.kind == CopyKind::kGather) {
      progress.sections[s].crc = crc;
      if (!all_scales(section, plan.scale_bytes())) break;
    } else if (crc != progress.expected[s]) {
      break;
    }
  }
  if (s == unit.end) return;
  const Lock lock(mutex_);
  CopyResult& result = progress.result;
  const auto section = static_cast<std::int32_t>(s);
  if (result.outcome == CopyOutcome::kOk || section < result.section) {
    const bool gather = job.kind == CopyKind::kGather;
    result = CopyResult{gather ? CopyOutcome::kFailed : CopyOutcome::kCorrupt, section};
  }
}

void CudaCopyEngine::Impl::end_part(Lock& lock, Job& job, std::size_t item) {
  Progress& progress = job.progress[item];
  if (--progress.parts_left != 0) return;
  if (job.kind == CopyKind::kGather && !progress.device_failed &&
      progress.result.outcome == CopyOutcome::kOk) {
    const CopyItem& what = job.items[item];
    lock.unlock();
    const Status status = write_record_header(what.record, what.length, what.spec,
                                              progress.sections.data(), progress.sections.size());
    lock.lock();
    if (!status.ok()) progress.result = CopyResult{CopyOutcome::kFailed, -1};
  }
  end_item(job, item);
}

void CudaCopyEngine::Impl::completions(std::vector<CopyCompletion>* out) {
  std::vector<std::shared_ptr<Job>> ended;
  {
    const Lock lock(mutex_);
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = ::read(event_fd_, &count, sizeof count);
    ended.swap(ended_);
    ended_.reserve(options_.queue);
    for (const std::shared_ptr<Job>& job : ended)
      unread_.erase(job->id);
  }
  out->clear();
  for (const std::shared_ptr<Job>& job : ended) {
    CopyCompletion& completion = out->emplace_back(CopyCompletion{job->id, {}});
    for (const Progress& progress : job->progress)
      completion.results.push_back(progress.result);
  }
}

Status CudaCopyEngine::Impl::run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
                                 std::vector<CopyResult>* results) {
  std::shared_ptr<Job> job;
  KVSTRATA_RETURN_IF_ERROR(start(0, false, kind, std::move(plan), std::move(items), &job));
  {
    Lock lock(mutex_);
    progress_.wait(lock, [&] { return job->done; });
  }
  results->clear();
  for (const Progress& progress : job->progress)
    results->push_back(progress.result);
  return Status();
}

namespace {

std::chrono::steady_clock::time_point deadline_of(std::chrono::nanoseconds timeout) {
  // A deadline beyond the clock's range is no deadline.
  constexpr auto kLongest = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + std::min<std::chrono::nanoseconds>(timeout, kLongest);
}

}  // namespace

bool CudaCopyEngine::Impl::wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) {
  const auto deadline = deadline_of(timeout);
  Lock lock(mutex_);
  const auto found = unread_.find(job_id);
  if (found == unread_.end()) return true;
  const std::shared_ptr<Job> job = found->second;
  return progress_.wait_until(lock, deadline, [&] { return job->done; });
}

Failure CudaCopyEngine::Impl::await_section(std::uint64_t job_id, std::size_t section,
                                            Stream stream, std::chrono::nanoseconds timeout,
                                            bool* queued) {
  const auto deadline = deadline_of(timeout);
  std::shared_ptr<Moment> moment;
  {
    Lock lock(mutex_);
    const auto found = unread_.find(job_id);
    *queued = found == unread_.end();
    if (*queued) return Failure{};
    const std::shared_ptr<Job> job = found->second;
    if (const std::size_t count = job->plan.copy->section_count(); section >= count) {
      return Failure{
          -1, "",
          "section: " + std::to_string(section) + " of a plan with " + std::to_string(count)};
    }
    const std::size_t index = job->layerwise() ? section : 0;
    const auto ready = [&] { return job->lost || job->sections_queued.size() > index; };
    progress_.wait_until(lock, deadline, [&] { return ready() || job->done; });
    *queued = !job->lost && (job->done || ready());
    if (!*queued || !ready()) return Failure{};
    moment = job->sections_queued[index];
  }
  const CurrentContext current(*device_);
  Failure failure = current.failure();
  if (!failure) failure = moment->make_wait(stream);
  if (failure) {
    *queued = false;
    if (is_sticky(failure.number)) {
      const Lock lock(mutex_);
      fail(failure);
    }
  }
  return failure;
}

bool CudaCopyEngine::Impl::cancel(std::uint64_t job_id) {
  const Lock lock(mutex_);
  const auto found = unread_.find(job_id);
  if (found == unread_.end()) return false;
  const std::shared_ptr<Job> job = found->second;
  return cancel_rest(lane_of(job->kind), job, CopyOutcome::kCancelled);
}

void CudaCopyEngine::Impl::drain() {
  Lock lock(mutex_);
  progress_.wait(lock, [this] { return active_ == 0; });
}

void CudaCopyEngine::Impl::close() {
  const std::lock_guard closing(close_mutex_);
  {
    Lock lock(mutex_);
    closing_ = true;
    for (const auto& lane : lanes_) {
      if (lane == nullptr) continue;
      while (!lane->queue.empty()) {
        const std::shared_ptr<Job> job = lane->queue.front();
        cancel_rest(*lane, job, CopyOutcome::kCancelled);
      }
      lane->queued.notify_all();
    }
    progress_.wait(lock, [this] { return active_ == 0; });
    work_.notify_all();
  }
  for (std::thread& thread : threads_)
    thread.join();
  threads_.clear();
}

Failure CudaCopyEngine::Impl::moment(Stream stream, std::shared_ptr<Moment>* out) {
  const CurrentContext current(*device_);
  if (Failure failure = current.failure()) return failure;
  std::shared_ptr<Moment> moment;
  if (Failure failure = device_->take_event(&moment)) return failure;
  if (Failure failure = moment->record(stream)) {
    if (is_sticky(failure.number)) {
      const Lock lock(mutex_);
      fail(failure);
    }
    return failure;
  }
  *out = std::move(moment);
  return Failure{};
}

Failure CudaCopyEngine::Impl::choose(const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                                     std::uint64_t host, std::uint64_t host_bytes) {
  const std::lock_guard choosing(choose_mutex_);
  Measured measured;
  if (Failure failure =
          measure(device_, plan, blocks, host, host_bytes, pinned_, options_, &measured)) {
    if (is_sticky(failure.number)) {
      const Lock lock(mutex_);
      fail(failure);
    }
    return failure;
  }
  Choice choice;
  if (Failure failure = best_choice(measured, options_.rounds, &choice)) return failure;
  Failure no_room;
  if (options_.choose && !options_.rounds && choice.way == Way::kStaged &&
      choice_.way != Way::kStaged) {
    // REQUIRES of reserve(): nobody queues; staged is not in use before the choice below.
    const CurrentContext current(*device_);
    for (const auto& lane : lanes_) {
      if (!no_room) no_room = lane->mover.reserve(options_.staging_bytes);
    }
    if (no_room) {
      for (const auto& lane : lanes_)
        lane->mover.give_back();
      choose_without_staging(device_->driver().explain(no_room), &choice);
    }
  }
  const Lock lock(mutex_);
  if (!options_.choose) {
    std::copy_n(measured.gb_per_s, 3, choice_.gb_per_s);
  } else {
    choice_ = std::move(choice);
  }
  return Failure{};
}

CudaCopyEngine::CudaCopyEngine(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

CudaCopyEngine::~CudaCopyEngine() {
  if (!impl_->owned()) {
    // A forked child has the state without its threads, and no driver: it is left behind.
    static_cast<void>(impl_.release());
  }
}

Failure CudaCopyEngine::create(std::shared_ptr<Device> device, const EngineOptions& options,
                               Status* status, std::unique_ptr<CudaCopyEngine>* out) {
  std::unique_ptr<Impl> impl;
  Failure failure = Impl::create(std::move(device), options, status, &impl);
  if (impl != nullptr) out->reset(new CudaCopyEngine(std::move(impl)));
  return failure;
}

int CudaCopyEngine::event_fd() const noexcept {
  return impl_->event_fd();
}

Status CudaCopyEngine::submit(std::uint64_t job_id, CopyKind kind, CudaPlan plan,
                              std::vector<CopyItem> items) {
  std::shared_ptr<Job> job;
  return impl_->start(job_id, true, kind, std::move(plan), std::move(items), &job);
}

void CudaCopyEngine::completions(std::vector<CopyCompletion>* out) {
  impl_->completions(out);
}

Status CudaCopyEngine::run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
                           std::vector<CopyResult>* results) {
  return impl_->run(kind, std::move(plan), std::move(items), results);
}

bool CudaCopyEngine::wait(std::uint64_t job_id, std::chrono::nanoseconds timeout) {
  return impl_->wait(job_id, timeout);
}

bool CudaCopyEngine::cancel(std::uint64_t job_id) {
  return impl_->cancel(job_id);
}

void CudaCopyEngine::drain() {
  impl_->drain();
}

void CudaCopyEngine::close() {
  if (impl_->owned()) impl_->close();
}

Choice CudaCopyEngine::choice() const {
  return impl_->choice();
}

Failure CudaCopyEngine::choose(const CopyPlan& plan, std::span<const std::uint32_t> blocks,
                               std::uint64_t host, std::uint64_t host_bytes) {
  return impl_->choose(plan, blocks, host, host_bytes);
}

Failure CudaCopyEngine::moment(Stream stream, std::shared_ptr<Moment>* out) {
  return impl_->moment(stream, out);
}

Failure CudaCopyEngine::await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                                      std::chrono::nanoseconds timeout, bool* queued) {
  return impl_->await_section(job_id, section, stream, timeout, queued);
}

PinnedMemory& CudaCopyEngine::pinned() noexcept {
  return impl_->pinned();
}

Failure CudaCopyEngine::failed() const {
  return impl_->failed();
}

}  // namespace kvstrata::cuda
