// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy_engine.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/threads.h"

namespace kvstrata::cuda {

Failure CudaCopyEngine::create(std::shared_ptr<Device> device, const EngineOptions& options,
                               Status* status, std::shared_ptr<CudaCopyEngine>* out) {
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
  const std::string& no_kernels = device->no_kernels();
  if (options.rounds && options.way == Way::kDma) {
    return Failure{-1, "", "engine: 'dma' cannot round KV; use 'kernel'"};
  }
  if (options.rounds && !no_kernels.empty()) {
    return Failure{-1, "", "kernels: needed to round KV, and " + no_kernels};
  }
  std::shared_ptr<CudaCopyEngine> engine(new CudaCopyEngine, [](CudaCopyEngine* made) {
    if (made->owned()) delete made;
  });
  engine->device_ = device;
  engine->options_ = options;
  if (options.way == Way::kKernel && !no_kernels.empty()) {
    engine->options_.way = Way::kDma;
    engine->reason_ = "not kernel: " + no_kernels;
  }
  const CurrentContext current(*device);
  if (Failure failure = current.failure()) return failure;
  for (const CopyKind kind : {CopyKind::kGather, CopyKind::kScatter}) {
    auto& direction = engine->directions_[static_cast<std::size_t>(kind)];
    direction = std::make_unique<Direction>(device, options.max_sms);
    if (Failure failure = direction->mover.open(kind == CopyKind::kScatter)) return failure;
    if (!options.rounds) continue;
    if (const Failure failure = direction->mover.reserve(options.staging_bytes)) {
      return Failure{-1, "", "staging_bytes: " + device->driver().explain(failure)};
    }
  }
  *status = engine->ledger_.open(options.queue);
  if (!status->ok()) return Failure{};
  const auto thread = [&](const char* name, auto work) {
    engine->threads_.push_back(start_thread(work));
    name_thread(engine->threads_.back(), name);
  };
  CudaCopyEngine* const self = engine.get();
  Direction& store = engine->direction_of(CopyKind::kGather);
  Direction& load = engine->direction_of(CopyKind::kScatter);
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
  if (status->ok()) *out = std::move(engine);
  return Failure{};
}

CudaCopyEngine::~CudaCopyEngine() {
  close();
}

Status CudaCopyEngine::start(std::uint64_t job_id, bool reported, CopyKind kind, CudaPlan plan,
                             std::vector<CopyItem> items, std::shared_ptr<Job>* out) {
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
  KVSTRATA_RETURN_IF_ERROR(ledger_.accept(job));
  Direction& direction = direction_of(kind);
  direction.queue.push_back(job);
  if (failed_) {
    cancel_rest(direction, job, CopyOutcome::kFailed);
  } else {
    direction.queued.notify_all();
  }
  *out = std::move(job);
  return Status();
}

Status CudaCopyEngine::check_rounding(const CopyPlan& plan, std::span<const CopyItem> items) const {
  if (!options_.rounds) {
    return Status(StatusCode::kBadArgument, "plan: rounds KV, and the engine was not made for that",
                  0, 0, -1);
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (!directions_[0]->mover.can_round(plan, items[i].blocks.size())) {
      return Status(StatusCode::kBadArgument,
                    "block_ids: a rounded section is larger than the staging buffer",
                    static_cast<std::int64_t>(items[i].blocks.size()), 0,
                    static_cast<std::int64_t>(i));
    }
  }
  return Status();
}

void CudaCopyEngine::completions(std::vector<CopyCompletion>* out) {
  std::vector<std::shared_ptr<Job>> ended;
  {
    const Lock lock(mutex_);
    ended = ledger_.ended();
    ledger_.forget_ended();
  }
  out->clear();
  for (const std::shared_ptr<Job>& job : ended) {
    CopyCompletion& completion = out->emplace_back(CopyCompletion{job->id, {}});
    for (const Progress& progress : job->progress)
      completion.outcomes.push_back(progress.outcome);
  }
}

Status CudaCopyEngine::run(CopyKind kind, CudaPlan plan, std::vector<CopyItem> items,
                           std::vector<CopyOutcome>* outcomes) {
  std::shared_ptr<Job> job;
  KVSTRATA_RETURN_IF_ERROR(start(0, false, kind, std::move(plan), std::move(items), &job));
  {
    Lock lock(mutex_);
    progress_.wait(lock, [&] { return job->done; });
  }
  outcomes->clear();
  for (const Progress& progress : job->progress)
    outcomes->push_back(progress.outcome);
  return Status();
}

Failure CudaCopyEngine::await_section(std::uint64_t job_id, std::size_t section, Stream stream,
                                      std::chrono::nanoseconds timeout, bool* queued) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::shared_ptr<Moment> moment;
  {
    Lock lock(mutex_);
    const std::shared_ptr<Job> job = ledger_.find(job_id);
    *queued = job == nullptr;
    if (*queued) return Failure{};
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

bool CudaCopyEngine::cancel(std::uint64_t job_id) {
  const Lock lock(mutex_);
  const std::shared_ptr<Job> job = ledger_.find(job_id);
  return job != nullptr && cancel_rest(direction_of(job->kind), job, CopyOutcome::kCancelled);
}

void CudaCopyEngine::close() {
  if (!owned()) return;
  const std::lock_guard closing(close_mutex_);
  {
    Lock lock(mutex_);
    ledger_.close();
    for (const auto& direction : directions_) {
      if (direction == nullptr) continue;
      while (!direction->queue.empty()) {
        const std::shared_ptr<Job> job = direction->queue.front();
        cancel_rest(*direction, job, CopyOutcome::kCancelled);
      }
      direction->queued.notify_all();
    }
    progress_.wait(lock, [this] { return ledger_.idle(); });
    work_.notify_all();
  }
  for (std::thread& thread : threads_)
    thread.join();
  threads_.clear();
}

Failure CudaCopyEngine::moment(Stream stream, std::shared_ptr<Moment>* out) {
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

}  // namespace kvstrata::cuda
