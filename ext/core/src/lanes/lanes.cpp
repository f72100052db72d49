// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/lanes.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "lanes/done.h"
#include "lanes/group.h"

namespace kvstrata {

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
  try {
    std::unique_ptr<Lanes> lanes(new Lanes(options));
    KVSTRATA_RETURN_IF_ERROR(lanes->done_->open());
    *out = std::move(lanes);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kNoSpace, "no memory for the lanes");
  }
  return Status();
}

int Lanes::event_fd() const noexcept {
  return done_->event_fd();
}

Status Lanes::submit(Lane lane, std::unique_ptr<LaneJob>& job, bool beyond_limit) noexcept {
  return by_lane_[index_of(lane)]->submit(lane, job, beyond_limit);
}

Status Lanes::take_done(std::vector<std::unique_ptr<LaneJob>>* out) noexcept {
  return done_->take(out);
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
