// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A few threads that help whoever has many small things to wait for, such as the syncs of a batch's
// directories: a device that is asked for all of them at once answers in the time of a few.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvstrata {

class Crew {
 public:
  explicit Crew(std::size_t helpers) noexcept : limit_(helpers) {}
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Calls work(0) .. work(count - 1), each once, in the calling thread and those of the helpers
  // that are free; returns when all have ended. `work` must not throw. Thread-safe.
  void each(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  struct Round {
    const std::function<void(std::size_t)>* work;
    std::size_t count;
    std::size_t next = 0;
    std::size_t ended = 0;
  };

  void help();
  void take_part(std::unique_lock<std::mutex>& lock, Round& round);

  const std::size_t limit_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a round began or ended; closing
  std::deque<Round*> open_;          // rounds with items that nobody took
  std::vector<std::thread> helpers_;
  bool closing_ = false;
};

}  // namespace kvstrata
