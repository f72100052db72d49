// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lanes/done.h"

namespace kvstrata {

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
  QueuedJob* take(std::size_t* piece) noexcept;
  void work();

  const std::string name_;
  const std::size_t workers_;
  const std::size_t max_puts_;  // pieces of puts that may run at the same time
  const std::uint64_t queue_limit_;
  DoneJobs* const done_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<JobQueue, kLaneCount> queues_;
  std::array<Pieces, kLaneCount> counts_{};
  std::size_t waiting_ = 0;  // pieces that no thread has begun, of all lanes
  std::size_t idle_ = 0;     // threads that wait for work
  std::size_t present_ = 0;  // threads that have not left
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kvstrata
