// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "splice/splicer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr std::int64_t kLongNs = 60'000'000'000;
const std::string kHead = "HTTP/1.1 200 OK\r\n\r\n";

// Two ends of a connection.
struct Pair {
  int ours = -1;
  int theirs = -1;

  Pair() {
    int ends[2];
    CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    ours = ends[0];
    theirs = ends[1];
  }
  ~Pair() {
    hang_up();
    ::close(ours);
  }
  void hang_up() {
    if (theirs >= 0) ::close(theirs);
    theirs = -1;
  }
  void say(const std::string& text) const {
    CHECK_EQ(::send(theirs, text.data(), text.size(), MSG_NOSIGNAL),
             static_cast<ssize_t>(text.size()));
  }
  // What has come, once it ends with `end`.
  std::string heard(const std::string& end) const {
    std::string got;
    std::vector<char> buffer(1 << 20);
    while (!got.ends_with(end)) {
      pollfd waited{theirs, POLLIN, 0};
      CHECK_EQ(::poll(&waited, 1, 10'000), 1);
      const ssize_t count = ::recv(theirs, buffer.data(), buffer.size(), 0);
      CHECK(count > 0);
      got.append(buffer.data(), static_cast<std::size_t>(count));
    }
    return got;
  }
};

struct Running {
  std::unique_ptr<Splicer> splicer;
  Pair engine;
  Pair client;
  std::shared_ptr<Splice> splice;
  bool under_way = false;

  Running() { CHECK_OK(Splicer::create({1'000'000, 100'000'000'000}, &splicer)); }

  void start(const std::string& early, std::int64_t silence_ns = kLongNs,
             std::int64_t stalled_ns = kLongNs) {
    const SpliceOptions options{engine.ours, client.ours, silence_ns, stalled_ns, true};
    const auto bytes = [](const std::string& text) {
      return std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    };
    CHECK_OK(splicer->start(options, bytes(kHead), bytes(early), &splice, &under_way));
  }

  // Waits for the end.
  SpliceEnd ended() {
    pollfd waited{splicer->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&waited, 1, 10'000), 1);
    const std::shared_ptr<Splice> taken = splicer->take_ended();
    CHECK(taken == splice);
    CHECK(splicer->take_ended() == nullptr);
    return taken->end;
  }
};

std::string chunk(const std::string& body) {
  char size[32];
  std::snprintf(size, sizeof size, "%zx\r\n", body.size());
  return size + body + "\r\n";
}

TEST(parts_are_passed_on_as_they_come_and_measured) {
  Running run;
  run.start(chunk("data: 1\n\n"));
  CHECK(run.under_way);
  CHECK_EQ(run.client.heard("1\n\n\r\n"), kHead + chunk("data: 1\n\n"));
  run.engine.say(chunk("data: 2\n\n") + "9\r\nda");
  CHECK_EQ(run.client.heard("da\r\n"), chunk("data: 2\n\nda"));
  run.engine.say("ta: 3\n\n\r\n0\r\n\r\n");
  CHECK_EQ(run.client.heard("0\r\n\r\n"), chunk("ta: 3\n\n") + "0\r\n\r\n");
  CHECK(run.ended() == SpliceEnd::kDone);
  CHECK(run.splice->exact);
  CHECK_EQ(run.splice->body_bytes, 27U);
  CHECK_EQ(run.splice->events, 1U);  // neither those of the early bytes, nor one that was cut
  CHECK_EQ(run.splice->gaps[0] + run.splice->gaps[1], 1U);
  CHECK_EQ(run.splice->tail, "data: 1\n\ndata: 2\n\ndata: 3\n\n");
}

TEST(bytes_after_the_end_make_it_not_exact) {
  Running run;
  run.start("0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n");
  CHECK(run.splice->end == SpliceEnd::kDone);
  CHECK(!run.splice->exact);
}

TEST(stop_and_close_end_it_and_a_closed_splicer_takes_none) {
  Running stopped;
  stopped.start("");
  stopped.splicer->stop(stopped.splice->id + 1);  // no such splice
  stopped.splicer->stop(stopped.splice->id);
  CHECK(stopped.ended() == SpliceEnd::kStopped);
  stopped.splicer->stop(stopped.splice->id);
  Running closed;
  closed.start("");
  closed.splicer->close();
  closed.splicer->close();
  CHECK(closed.ended() == SpliceEnd::kStopped);
  std::shared_ptr<Splice> none;
  bool under_way = true;
  const Status refused = closed.splicer->start({}, {}, {}, &none, &under_way);
  CHECK(refused.code() == StatusCode::kClosed);
  CHECK(!under_way && none == nullptr);
}

TEST(many_splices_end_each_with_its_own_bytes) {
  std::unique_ptr<Splicer> splicer;
  CHECK_OK(Splicer::create({}, &splicer));
  std::vector<std::unique_ptr<Pair>> engines;
  std::vector<std::unique_ptr<Pair>> clients;
  std::vector<std::shared_ptr<Splice>> splices(100);
  for (std::size_t i = 0; i < splices.size(); ++i) {
    engines.push_back(std::make_unique<Pair>());
    clients.push_back(std::make_unique<Pair>());
    const SpliceOptions options{engines[i]->ours, clients[i]->ours, kLongNs, kLongNs, true};
    engines[i]->say(chunk("data: " + std::to_string(i)));
    bool under_way = false;
    CHECK_OK(splicer->start(options, {}, {}, &splices[i], &under_way));
    CHECK(under_way);
    engines[i]->say("0\r\n\r\n");
  }
  for (std::size_t i = 0; i < splices.size(); ++i) {
    std::string got = clients[i]->heard("0\r\n\r\n");
    ChunkReader reader;
    std::size_t used = 0;
    const std::size_t kept =
        reader.decode(reinterpret_cast<std::uint8_t*>(got.data()), got.size(), &used);
    CHECK_EQ(got.substr(0, kept), "data: " + std::to_string(i));
  }
  std::size_t taken = 0;
  while (taken < splices.size()) {
    pollfd waited{splicer->event_fd(), POLLIN, 0};
    CHECK_EQ(::poll(&waited, 1, 10'000), 1);
    while (const std::shared_ptr<Splice> one = splicer->take_ended()) {
      CHECK(one->end == SpliceEnd::kDone);
      ++taken;
    }
  }
}

}  // namespace
