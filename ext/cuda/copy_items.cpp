// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// The work of a GPU copy engine's threads on the items of a job, from the queue to their end.
#include <algorithm>
#include <cstring>
#include <utility>

#include "copy_engine.h"

namespace kvstrata::cuda {
namespace {

// The most bytes of a direction that have begun and not ended, unless a single item has more. Items
// that have begun cannot be cancelled, so the rest waits in the queue.
constexpr std::uint64_t kAheadBytes = 128 << 20;

// A gather's checksums begin when this many bytes more have arrived, while the rest is copied.
constexpr std::uint64_t kPartBytes = 8 << 20;

// Whether all numbers of a section could be rounded; true if `bytes` is 0 (no rounding).
bool all_scales(const unsigned char* scales, std::uint64_t bytes) {
  for (std::uint64_t at = 0; at < bytes; at += sizeof(std::uint32_t)) {
    std::uint32_t scale = 0;
    std::memcpy(&scale, scales + at, sizeof scale);
    if (!fp8::is_scale(scale)) return false;
  }
  return true;
}

}  // namespace

void CudaCopyEngine::finish(const std::shared_ptr<Job>& job) {
  ledger_.end(job);
  progress_.notify_all();
}

void CudaCopyEngine::end_item(const std::shared_ptr<Job>& job, std::size_t item) {
  Progress& progress = job->progress[item];
  if (progress.device_failed) progress.outcome = CopyOutcome::kFailed;
  if (--job->items_left == 0) finish(job);
}

bool CudaCopyEngine::cancel_rest(Direction& direction, const std::shared_ptr<Job>& job,
                                 CopyOutcome outcome) {
  if (job->next_item == job->end_item) return false;
  std::erase(direction.queue, job);
  job->lost = true;
  const std::size_t end = std::exchange(job->end_item, job->next_item);
  for (std::size_t i = job->next_item; i < end; ++i) {
    job->progress[i].outcome = outcome;
    end_item(job, i);
  }
  progress_.notify_all();
  return true;
}

void CudaCopyEngine::fail(const Failure& failure) {
  if (failed_) return;
  failed_ = failure;
  for (const auto& direction : directions_) {
    while (!direction->queue.empty()) {
      const std::shared_ptr<Job> job = direction->queue.front();
      cancel_rest(*direction, job, CopyOutcome::kFailed);
    }
  }
}

void CudaCopyEngine::submit_items(Direction& direction) {
  const CurrentContext current(*device_);
  Lock lock(mutex_);
  for (;;) {
    direction.queued.wait(lock, [&] {
      return (ledger_.closed() && direction.queue.empty()) ||
             (!direction.queue.empty() &&
              (direction.begun.empty() || direction.ahead_bytes < kAheadBytes));
    });
    if (direction.queue.empty()) break;
    const std::shared_ptr<Job> job = direction.queue.front();
    const std::size_t first = job->next_item;
    job->next_item = job->layerwise() ? job->end_item : first + 1;
    const std::size_t last = job->next_item;
    if (last == job->end_item) direction.queue.pop_front();
    lock.unlock();
    begin(direction, job, first, last);
    lock.lock();
  }
  direction.submitting = false;
  direction.came.notify_all();
}

void CudaCopyEngine::begin(Direction& direction, const std::shared_ptr<Job>& job, std::size_t first,
                           std::size_t last) {
  const CopyPlan& plan = *job->plan.copy;
  const std::size_t count = plan.section_count();
  Begun begun{.job = job, .items = {}, .begin = 0, .end = count, .moment = nullptr, .bytes = 0};
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
          check_record_for_scatter(plan, item.blocks.size(), item.record, item.length, item.spec, 0,
                                   count, progress.expected.data());
      if (!status.ok()) {
        progress.outcome = copy_outcome(status);
        bad.push_back(i);
        continue;
      }
    }
    begun.items.push_back(i);
    begun.bytes += job->payload_bytes(i);
  }
  Failure failure;
  {
    Lock lock(mutex_);
    failure = failed_;
    for (const std::size_t i : begun.items) {
      job->progress[i].parts_left = 1;  // the device's last copies
      if (job->kind == CopyKind::kScatter) add_units(job, i, 0, count);
    }
    for (const std::size_t i : bad) {
      end_item(job, i);
    }
  }
  if (!failure) failure = queue_copies(direction, job, begun.items, &begun);
  // Copies that were queued before a failure still run, so the items end with an event in any case.
  Failure unsettled = device_->take_event(&begun.moment);
  if (!unsettled) unsettled = begun.moment->record(direction.mover.stream());
  if (unsettled) {
    begun.moment = nullptr;
    if (Failure lost = Device::check("cuStreamSynchronize", device_->driver().stream_synchronize(
                                                                direction.mover.stream()))) {
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
  if (!begun.items.empty()) add_begun(direction, std::move(begun));
}

void CudaCopyEngine::add_begun(Direction& direction, Begun begun) {
  direction.ahead_bytes += begun.bytes;
  direction.begun.push_back(std::move(begun));
  direction.came.notify_all();
}

// Of the gather of one item, each part but the last becomes a Begun of its own, and `last` keeps
// what is left.
Failure CudaCopyEngine::queue_copies(Direction& direction, const std::shared_ptr<Job>& owner,
                                     const std::vector<std::size_t>& items, Begun* last) {
  Job& job = *owner;
  Mover& mover = direction.mover;
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
      if (Failure failure = mover.queue(options_.way, job.kind, plan, job.items[i].blocks,
                                        reinterpret_cast<std::uint64_t>(job.payload(i)),
                                        pinnings[n], begin, end)) {
        mover.forget();
        return failure;
      }
    }
    return mover.flush();
  };
  if (job.kind == CopyKind::kGather && items.size() == 1) {
    const std::size_t n_blocks = job.items[items.front()].blocks.size();
    for (std::size_t s = 1; s < count; ++s) {
      const std::uint64_t bytes =
          plan.section_offset(s, n_blocks) - plan.section_offset(last->begin, n_blocks);
      if (bytes < kPartBytes || last->bytes - bytes < kPartBytes) continue;
      Begun part{.job = owner,
                 .items = items,
                 .begin = last->begin,
                 .end = s,
                 .moment = nullptr,
                 .bytes = bytes};
      if (Failure failure = queue(part.begin, part.end)) return failure;
      if (Failure failure = device_->take_event(&part.moment)) return failure;
      if (Failure failure = part.moment->record(mover.stream())) return failure;
      last->begin = s;
      last->bytes -= bytes;
      const Lock lock(mutex_);
      ++job.progress[items.front()].parts_left;
      add_begun(direction, std::move(part));
    }
    return queue(last->begin, count);
  }
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

void CudaCopyEngine::finish_items(Direction& direction) {
  const CurrentContext current(*device_);
  Lock lock(mutex_);
  for (;;) {
    direction.came.wait(lock, [&] { return !direction.begun.empty() || !direction.submitting; });
    if (direction.begun.empty()) return;
    // The entry stays in the list while this thread waits for its moment, because ahead_bytes still
    // includes it.
    const Begun& begun = direction.begun.front();
    const std::shared_ptr<Job> job = begun.job;
    const std::shared_ptr<Moment> moment = begun.moment;
    const bool gone = is_sticky(failed_.number);
    Failure failure;
    if (moment != nullptr && !gone) {
      lock.unlock();
      failure = moment->wait();
      lock.lock();
      // After any error it is unknown when a copy of this stream has ended.
      if (failure) fail(failure);
    }
    if (gone || failure) {
      job->lost = true;
      for (const std::size_t i : begun.items)
        job->progress[i].device_failed = true;
    }
    const Begun ended = std::move(direction.begun.front());
    direction.ahead_bytes -= ended.bytes;
    direction.begun.pop_front();
    direction.queued.notify_all();
    for (const std::size_t i : ended.items) {
      if (job->kind == CopyKind::kGather && !job->progress[i].device_failed) {
        add_units(job, i, ended.begin, ended.end);
      }
      end_part(lock, job, i);
    }
  }
}

void CudaCopyEngine::add_units(const std::shared_ptr<Job>& job, std::size_t item, std::size_t begin,
                               std::size_t end) {
  const CopyPlan& plan = *job->plan.copy;
  for (std::size_t s = begin; s < end; s = units_.back().end) {
    const std::size_t stop = std::min(end, unit_end(plan, job->items[item].blocks.size(), s));
    units_.push_back(Unit{job, item, s, stop});
    ++job->progress[item].parts_left;
  }
  work_.notify_all();
}

void CudaCopyEngine::help() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return !units_.empty() || (ledger_.closed() && ledger_.idle()); });
    if (units_.empty()) return;
    const Unit unit = std::move(units_.front());
    units_.pop_front();
    lock.unlock();
    compute(unit);
    lock.lock();
    end_part(lock, unit.job, unit.item);
  }
}

void CudaCopyEngine::compute(const Unit& unit) {
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
  const bool gather = job.kind == CopyKind::kGather;
  progress.outcome = gather ? CopyOutcome::kFailed : CopyOutcome::kCorrupt;
}

void CudaCopyEngine::end_part(Lock& lock, const std::shared_ptr<Job>& job, std::size_t item) {
  Progress& progress = job->progress[item];
  if (--progress.parts_left != 0) return;
  if (job->kind == CopyKind::kGather && !progress.device_failed &&
      progress.outcome == CopyOutcome::kOk) {
    const CopyItem& what = job->items[item];
    lock.unlock();
    const Status status = write_record_header(what.record, what.length, what.spec,
                                              progress.sections.data(), progress.sections.size());
    lock.lock();
    if (!status.ok()) progress.outcome = CopyOutcome::kFailed;
  }
  end_item(job, item);
}

}  // namespace kvstrata::cuda
