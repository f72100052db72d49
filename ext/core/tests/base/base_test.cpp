// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <future>
#include <string>
#include <thread>

#include "base/event_fd.h"
#include "base/key_hash.h"
#include "base/sizes.h"
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

TEST(a_long_thread_name_is_cut) {
  char name[32] = "";
  std::promise<void> named;  // a thread that has ended has no name
  std::thread thread([waited = named.get_future()] { waited.wait(); });
  name_thread(thread, "kv-much-longer-than-it-may-be");
  const int error = pthread_getname_np(thread.native_handle(), name, sizeof name);
  named.set_value();
  thread.join();
  CHECK_EQ(error, 0);
  CHECK_EQ(std::string(name), std::string("kv-much-longer-"));
}

TEST(sizes_are_rounded_up_to_whole_units) {
  CHECK_EQ(round_up(0, 4096), std::uint64_t{0});
  CHECK_EQ(round_up(1, 4096), std::uint64_t{4096});
  CHECK_EQ(round_up(4096, 4096), std::uint64_t{4096});
  CHECK_EQ(round_up(4097, 4096), std::uint64_t{8192});
  CHECK_EQ(round_up((std::uint64_t{1} << 63) - 1, 4096), std::uint64_t{1} << 63);
}

TEST(the_first_eight_bytes_of_a_key_are_its_hash) {
  Digest key{};
  key[1] = 2;
  CHECK_EQ(KeyHash()(key), std::size_t{512});
  key[8] = 1;
  CHECK_EQ(KeyHash()(key), std::size_t{512});
}

}  // namespace
