// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "base/crew.h"

#include <algorithm>
#include <system_error>

#include "base/threads.h"

namespace kvstrata {

Crew::~Crew() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& helper : helpers_)
    helper.join();
}

void Crew::each(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count == 0) return;
  Round round{.work = &work, .count = count};
  std::unique_lock lock(mutex_);
  open_.push_back(&round);
  while (helpers_.size() < std::min(limit_, count - 1)) {
    try {
      helpers_.push_back(start_thread([this] { help(); }));
    } catch (const std::system_error&) {
      break;  // no thread can be started: the caller and the running helpers do the work
    }
  }
  changed_.notify_all();
  take_part(lock, round);
  changed_.wait(lock, [&] { return round.ended == round.count; });
}

void Crew::help() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !open_.empty(); });
    if (open_.empty()) return;
    take_part(lock, *open_.front());
  }
}

// Does items of `round` until none is left to take. Once the last item has ended, the caller of
// each() returns and `round` is gone: no other thread may touch it after that.
void Crew::take_part(std::unique_lock<std::mutex>& lock, Round& round) {
  while (round.next < round.count) {
    const std::size_t item = round.next++;
    if (round.next == round.count) open_.erase(std::ranges::find(open_, &round));
    const bool last_taken = round.next == round.count;
    lock.unlock();
    (*round.work)(item);
    lock.lock();
    round.ended += 1;
    if (round.ended == round.count) {
      changed_.notify_all();
      return;
    }
    if (last_taken) return;
  }
}

}  // namespace kvstrata
