// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// A few helper threads that make many short blocking calls together with the calling thread, such
// as the fsyncs of a batch's directories. A device that gets all of these calls at the same time
// finishes them in the time of a few.
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
  // At most `helpers` threads, which start when a call of each() first needs them.
  explicit Crew(std::size_t helpers) noexcept : limit_(helpers) {}
  // Joins the threads. REQUIRES: no call of each() is running.
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // Calls work(0) .. work(count - 1), each once, in the calling thread and in idle helpers; returns
  // when all calls have ended. `work` must not throw. Thread-safe.
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
  std::condition_variable changed_;  // a round began or ended, or the crew is closing
  std::deque<Round*> open_;          // rounds with items that no thread has taken
  std::vector<std::thread> helpers_;
  bool closing_ = false;
};

}  // namespace kvstrata
