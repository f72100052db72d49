// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "routing/cost.h"

#include <cmath>
#include <vector>

#include "routing/lowest.h"
#include "routing/rendezvous.h"
#include "support/check.h"

using namespace kvstrata;

namespace {

const Moment kMoment{.tokens = 1000, .now_s = 10.0, .block_life_s = 300.0, .event_lag_s = 1.0};

PrefixCopy load_of(std::int64_t tokens) {
  PrefixCopy copy;
  copy.tokens = tokens;
  copy.is_load = true;
  copy.load_tokens_s = 1e6;
  return copy;
}

TEST(an_idle_engine_costs_its_computing) {
  const EngineLoad engine{.tokens_s = 100.0};
  const Estimate found = estimate(kMoment, engine, 0, {});
  CHECK_EQ(found.cost_s(), 10.0);
  CHECK_EQ(found.copy, -1);
}

TEST(at_least_one_token_is_computed) {
  const EngineLoad engine{.tokens_s = 100.0};
  CHECK_EQ(estimate(kMoment, engine, 5000, {}).cost_s(), 0.01);
  CHECK_EQ(estimate(kMoment, engine, 5000, {}).cached_tokens, 999);
}

TEST(an_engine_that_is_late_needs_as_long_again) {
  EngineLoad engine{.tokens_s = 100.0, .backlog_tokens = 200.0, .at_s = 10.0};
  CHECK_EQ(queue_s(engine, 11.0), 1.0);
  CHECK_EQ(queue_s(engine, 15.0), 0.0);
  engine.may_be_late = true;
  engine.moved_s = 10.0;
  engine.prefill_tokens = 200;
  CHECK_EQ(queue_s(engine, 15.0), 3.0);
}

TEST(a_load_that_pays_is_taken_and_brings_what_the_cache_lacks) {
  const EngineLoad engine{.tokens_s = 100.0};
  const std::vector<PrefixCopy> copies{load_of(600), load_of(800)};
  const Estimate found = estimate(kMoment, engine, 300, copies);
  CHECK_EQ(found.copy, 1);
  CHECK_EQ(found.cached_tokens, 800);
  CHECK_EQ(found.load_tokens, 500);
  CHECK_EQ(found.compute_s, 2.0);
}

TEST(a_load_that_is_slower_than_computing_is_left) {
  const EngineLoad engine{.tokens_s = 100.0};
  std::vector<PrefixCopy> copies{load_of(800)};
  copies[0].latency_s = 9.0;
  CHECK_EQ(estimate(kMoment, engine, 0, copies).copy, -1);
  CHECK_EQ(estimate(kMoment, engine, 0, copies).load_tokens, 0);
}

TEST(a_copy_counts_by_how_likely_it_is) {
  const EngineLoad engine{.tokens_s = 100.0};
  std::vector<PrefixCopy> copies(1);
  copies[0].tokens = 900;
  copies[0].certainty = Certainty::kUnconfirmed;
  copies[0].age_s = 3.0;
  CHECK_EQ(estimate(kMoment, engine, 0, copies).compute_s, 10.0);
  copies[0].age_s = 1.0;
  CHECK_EQ(estimate(kMoment, engine, 0, copies).compute_s, 1.0);
  copies[0].certainty = Certainty::kDegraded;
  copies[0].age_s = 300.0;
  CHECK(std::abs(estimate(kMoment, engine, 0, copies).compute_s - (10.0 - 9.0 * std::exp(-1.0))) <
        1e-12);
  copies[0].certainty = Certainty::kPredicted;
  copies[0].ready_at_s = 12.0;
  CHECK_EQ(estimate(kMoment, engine, 0, copies).cost_s(), 3.0);
}

TEST(what_does_not_fit_is_computed_again) {
  const EngineLoad engine{.tokens_s = 100.0, .context_tokens = 4500, .kv_tokens = 5000};
  CHECK_EQ(estimate(kMoment, engine, 0, {}).preemption_s, 5.0);
}

TEST(the_lowest_costs_and_the_near_tie) {
  const std::vector<double> costs{3.0, 1.0, 2.0, 1.005, 9.0};
  const LowestCosts found = lowest_costs(costs, 3, 0.01);
  CHECK_EQ(found.limit, 1.01);
  CHECK_EQ(found.last, 2.0);
  CHECK_EQ(lowest_costs(costs, 99, 0.0).last, 9.0);
}

TEST(a_key_ranks_one_of_equal_hashes_first) {
  const std::vector<std::uint64_t> hashes{7, 7, 7};
  CHECK_EQ(ranked_first(7, hashes), 0u);
  static_assert(kRankMultiplier % 2 == 1);
}

}  // namespace
