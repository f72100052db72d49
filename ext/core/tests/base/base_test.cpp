// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <thread>

#include "base/event_fd.h"
#include "base/threads.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

bool readable(const EventFd& event) {
  pollfd waited{event.fd(), POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

bool blocks(int signal) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return sigismember(&blocked, signal) == 1;
}

TEST(an_event_is_readable_from_a_signal_to_the_next_drain) {
  EventFd event;
  CHECK_EQ(event.fd(), -1);
  CHECK_OK(event.open());
  CHECK(!readable(event));
  event.signal();
  event.signal();
  CHECK(readable(event));
  event.drain();
  CHECK(!readable(event));
  event.drain();  // an event that nobody signalled is drained without waiting
}

TEST(a_thread_of_ours_blocks_signals) {
  bool inner = false;
  start_thread([&] { inner = blocks(SIGTERM) && blocks(SIGHUP); }).join();
  CHECK(inner);
  CHECK(!blocks(SIGTERM));
}

TEST(only_threads_started_meanwhile_block_signals) {
  bool inner = false;
  std::thread thread;
  {
    const SignalsBlocked blocked;
    thread = std::thread([&] { inner = blocks(SIGUSR1); });
  }
  thread.join();
  CHECK(inner);
  CHECK(!blocks(SIGUSR1));
}

}  // namespace
