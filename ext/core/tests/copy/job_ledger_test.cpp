// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "copy/job_ledger.h"

#include <poll.h>

#include <string>

#include "support/check.h"

using namespace kvstrata;

namespace {

struct Job {
  std::uint64_t id = 0;
  bool reported = true;
  bool done = false;
};

using Ledger = JobLedger<Job>;

enum class State { kUnknown, kRunning, kEnded };

// The state of a reported job, from what the ledger shows of it.
State state_of(const Ledger& ledger, std::uint64_t id) {
  const std::shared_ptr<Job> job = ledger.find(id);
  if (job == nullptr) return State::kUnknown;
  return job->done ? State::kEnded : State::kRunning;
}

bool readable(const Ledger& ledger) {
  pollfd waited{ledger.event_fd(), POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

// The only job of a ledger, in this state.
std::shared_ptr<Job> job_in(Ledger& ledger, State state) {
  auto job = std::make_shared<Job>(Job{7});
  CHECK_OK(ledger.open(2));
  if (state != State::kUnknown) CHECK_OK(ledger.accept(job));
  if (state == State::kEnded) ledger.end(job);
  return job;
}

}  // namespace

TEST(every_legal_call_leads_where_the_table_says) {
  struct Cell {
    State from;
    const char* call;
    State to;
  };
  constexpr Cell kTable[] = {
      {State::kUnknown, "accept", State::kRunning},
      {State::kRunning, "accept", State::kRunning},
      {State::kRunning, "withdraw", State::kUnknown},
      {State::kRunning, "end", State::kEnded},
      {State::kEnded, "accept", State::kEnded},
      {State::kEnded, "forget_ended", State::kUnknown},
      {State::kRunning, "forget_ended", State::kRunning},
  };
  for (const Cell& cell : kTable) {
    Ledger ledger;
    const std::shared_ptr<Job> job = job_in(ledger, cell.from);
    const std::string call = cell.call;
    if (call == "accept") {
      const Status status = ledger.accept(std::make_shared<Job>(Job{7}));
      CHECK_EQ(status.code(), cell.from == State::kUnknown ? StatusCode::kOk : StatusCode::kExists);
    } else if (call == "withdraw") {
      ledger.withdraw(*job);
    } else if (call == "end") {
      ledger.end(job);
    } else {
      ledger.forget_ended();
    }
    CHECK_EQ(state_of(ledger, 7), cell.to);
    CHECK_EQ(ledger.idle(), cell.to != State::kRunning);
    CHECK_EQ(ledger.ended().size(), cell.to == State::kEnded ? 1U : 0U);
    CHECK_EQ(readable(ledger), cell.to == State::kEnded);
  }
}

TEST(a_full_ledger_refuses_until_an_end_is_read) {
  Ledger ledger;
  CHECK_OK(ledger.open(1));
  const auto first = std::make_shared<Job>(Job{1});
  CHECK_OK(ledger.accept(first));
  CHECK_EQ(ledger.accept(std::make_shared<Job>(Job{2})).code(), StatusCode::kQueueFull);
  ledger.end(first);
  CHECK_EQ(ledger.accept(std::make_shared<Job>(Job{2})).code(), StatusCode::kQueueFull);
  ledger.forget_ended();
  CHECK_OK(ledger.accept(std::make_shared<Job>(Job{2})));
}

TEST(a_job_that_is_not_reported_takes_no_place_and_leaves_no_end) {
  Ledger ledger;
  CHECK_OK(ledger.open(1));
  CHECK_OK(ledger.accept(std::make_shared<Job>(Job{1})));
  const auto job = std::make_shared<Job>(Job{1, false});
  CHECK_OK(ledger.accept(job));
  ledger.end(job);
  CHECK_EQ(job->done, true);
  CHECK_EQ(ledger.ended().size(), 0U);
  CHECK_EQ(readable(ledger), false);
  CHECK_EQ(state_of(ledger, 1), State::kRunning);
}

TEST(a_closed_ledger_accepts_nothing_and_lets_running_jobs_end) {
  Ledger ledger;
  const std::shared_ptr<Job> job = job_in(ledger, State::kRunning);
  ledger.close();
  CHECK_EQ(ledger.accept(std::make_shared<Job>(Job{8})).code(), StatusCode::kClosed);
  CHECK_EQ(ledger.accept(std::make_shared<Job>(Job{8, false})).code(), StatusCode::kClosed);
  ledger.end(job);
  CHECK_EQ(state_of(ledger, 7), State::kEnded);
  CHECK_EQ(ledger.idle(), true);
}

TEST(ends_are_told_in_their_order) {
  Ledger ledger;
  CHECK_OK(ledger.open(3));
  const auto first = std::make_shared<Job>(Job{1});
  const auto second = std::make_shared<Job>(Job{2});
  CHECK_OK(ledger.accept(first));
  CHECK_OK(ledger.accept(second));
  ledger.end(second);
  ledger.end(first);
  CHECK_EQ(ledger.ended().at(0)->id, 2U);
  CHECK_EQ(ledger.ended().at(1)->id, 1U);
}
