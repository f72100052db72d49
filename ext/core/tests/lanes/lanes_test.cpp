// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "lanes/lanes.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "support/check.h"

using namespace kvstrata;

namespace {

constexpr int kLongMs = 60'000;

// Opens once, for any number of waiting threads.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    arrived_ += 1;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  // Waits until so many are inside.
  void await_arrived(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrived_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrived_ = 0;
};

struct Job final : LaneJob {
  std::function<void(std::size_t)> work;
  std::function<void()> at_end;
  std::size_t count = 1;

  std::size_t pieces() const noexcept override { return count; }
  void run(std::size_t index) override {
    if (work) work(index);
  }
  void end() noexcept override {
    if (at_end) at_end();
  }
};

std::unique_ptr<LaneJob> job(std::function<void(std::size_t)> work, std::size_t count = 1,
                             std::function<void()> at_end = {}) {
  auto made = std::make_unique<Job>();
  made->work = std::move(work);
  made->at_end = std::move(at_end);
  made->count = count;
  return made;
}

std::unique_ptr<Lanes> lanes_of(std::uint32_t common, std::array<std::uint32_t, 4> own = {},
                                std::uint32_t limit = 1024) {
  std::unique_ptr<Lanes> lanes;
  CHECK_OK(Lanes::create(
      {.name = "test", .common_workers = common, .own_workers = own, .queue_limit = limit},
      &lanes));
  return lanes;
}

void submit(Lanes& lanes, Lane lane, std::unique_ptr<LaneJob> work) {
  CHECK_OK(lanes.submit(lane, work));
  CHECK(work == nullptr);
}

// Waits until `count` jobs are done and returns them in the order in which they ended.
std::vector<std::unique_ptr<LaneJob>> done(Lanes& lanes, std::size_t count) {
  std::vector<std::unique_ptr<LaneJob>> all;
  while (all.size() < count) {
    pollfd ready{lanes.event_fd(), POLLIN, 0};
    CHECK_EQ(poll(&ready, 1, kLongMs), 1);
    std::vector<std::unique_ptr<LaneJob>> some;
    lanes.take_done(&some);
    for (auto& ended : some)
      all.push_back(std::move(ended));
  }
  return all;
}

}  // namespace

TEST(every_piece_runs_once_and_the_end_after_all_of_them) {
  auto lanes = lanes_of(4);
  constexpr std::size_t kPieces = 200;
  std::array<std::atomic<int>, kPieces> runs{};
  std::atomic<int> seen_at_end{-1};
  submit(*lanes, Lane::kPut,
         job([&](std::size_t i) { runs[i] += 1; }, kPieces,
             [&] {
               int total = 0;
               for (auto& run : runs)
                 total += run;
               seen_at_end = total;
             }));
  CHECK_EQ(done(*lanes, 1).size(), 1U);
  CHECK_EQ(seen_at_end.load(), static_cast<int>(kPieces));
  for (auto& run : runs)
    CHECK_EQ(run.load(), 1);
}

TEST(pieces_of_one_job_run_at_the_same_time) {
  auto lanes = lanes_of(4, {0, 3, 0, 0});
  Gate gate;
  submit(*lanes, Lane::kLoad, job([&](std::size_t) { gate.pass(); }, 3));
  gate.await_arrived(3);
  gate.open();
  done(*lanes, 1);
}

TEST(in_the_common_group_lookups_go_first_then_loads_deletes_puts) {
  auto lanes = lanes_of(2);
  Gate gate;
  Gate other;
  submit(*lanes, Lane::kLoad, job([&](std::size_t) { gate.pass(); }));
  submit(*lanes, Lane::kLoad, job([&](std::size_t) { other.pass(); }));
  gate.await_arrived(1);
  other.await_arrived(1);
  std::vector<Lane> order;  // of one thread: the other one stays where it is
  for (const Lane lane : {Lane::kPut, Lane::kDelete, Lane::kLoad, Lane::kLookup})
    submit(*lanes, lane, job([&order, lane](std::size_t) { order.push_back(lane); }));
  gate.open();
  done(*lanes, 5);
  CHECK(order == (std::vector<Lane>{Lane::kLookup, Lane::kLoad, Lane::kDelete, Lane::kPut}));
  other.open();
  done(*lanes, 1);
}

TEST(lanes_of_their_own_do_not_share_threads) {
  auto lanes = lanes_of(1, {1, 1, 1, 1});
  Gate gate;
  submit(*lanes, Lane::kDelete, job([&](std::size_t) { gate.pass(); }));
  gate.await_arrived(1);
  for (const Lane lane : {Lane::kLookup, Lane::kLoad, Lane::kPut}) {
    submit(*lanes, lane, job({}));
    done(*lanes, 1);
  }
  gate.open();
  done(*lanes, 1);
}

TEST(a_forked_child_can_let_go_of_them) {
  auto lanes = lanes_of(2);
  Gate gate;
  submit(*lanes, Lane::kPut, job([&](std::size_t) { gate.pass(); }));
  gate.await_arrived(1);
  const pid_t child = fork();
  if (child == 0) {
    lanes.reset();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  gate.open();
  done(*lanes, 1);
}

TEST(abandoned_lanes_end_what_runs_and_nobody_waits) {
  Lanes::abandon(nullptr);
  Lanes::abandon(lanes_of(2));
  auto idle = lanes_of(2);
  submit(*idle, Lane::kPut, job({}));
  done(*idle, 1);
  Lanes::abandon(std::move(idle));
  auto busy = lanes_of(2);
  Gate gate;
  submit(*busy, Lane::kPut, job([&](std::size_t) { gate.pass(); }));
  gate.await_arrived(1);
  Lanes* left = busy.get();
  Lanes::abandon(std::move(busy));
  auto late = job({});
  CHECK_EQ(left->submit(Lane::kPut, late).code(), StatusCode::kClosed);
  gate.open();
  done(*left, 1);
  const std::unique_ptr<Lanes> joined(left);
}

TEST(many_threads_may_submit_and_each_job_is_done_once) {
  auto lanes = lanes_of(3, {0, 2, 0, 0}, Lanes::kMaxQueue);
  constexpr int kThreads = 4;
  constexpr int kJobs = 300;
  std::atomic<int> runs{0};
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kJobs; ++i) {
        auto work = job([&](std::size_t) { runs += 1; }, static_cast<std::size_t>(i % 4 + 1));
        if (!lanes->submit(static_cast<Lane>((i + t) % 4), work).ok()) refused += 1;
      }
    });
  }
  const auto all = done(*lanes, kThreads * kJobs);
  for (std::thread& thread : threads)
    thread.join();
  CHECK_EQ(refused.load(), 0);
  CHECK_EQ(all.size(), static_cast<std::size_t>(kThreads * kJobs));
  CHECK_EQ(runs.load(), kThreads * kJobs * 10 / 4);
}
