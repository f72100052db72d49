// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "routing/cost.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvstrata {

namespace {

// How likely it is that the copy can be used.
double probability(const PrefixCopy& copy, const Moment& moment) noexcept {
  switch (copy.certainty) {
    case Certainty::kDegraded:
      return std::exp(-copy.age_s / moment.block_life_s);
    case Certainty::kUnconfirmed:
      return copy.age_s > 2 * moment.event_lag_s ? 0.0 : 1.0;
    case Certainty::kExact:
    case Certainty::kPredicted:
      break;
  }
  return 1.0;
}

}  // namespace

double queue_s(const EngineLoad& engine, double now_s) noexcept {
  const double rate = engine.tokens_s;
  const double drained_s = engine.backlog_tokens / rate - std::max(0.0, now_s - engine.at_s);
  double seconds = std::max(drained_s, static_cast<double>(engine.behind_tokens) / rate);
  if (engine.may_be_late) {
    const double waiting_s = static_cast<double>(engine.prefill_tokens) / rate;
    seconds += std::max(0.0, now_s - engine.moved_s - waiting_s);
  }
  return seconds;
}

Estimate estimate(const Moment& moment, const EngineLoad& engine, std::int64_t held_tokens,
                  std::span<const PrefixCopy> copies) noexcept {
  const double token_s = 1.0 / engine.tokens_s;
  const auto all = static_cast<double>(moment.tokens);
  const std::int64_t most = moment.tokens - 1;  // At least one token is always computed.
  const std::int64_t sure = std::min(held_tokens, most);
  Estimate best;
  best.queue_s = queue_s(engine, moment.now_s);
  best.cached_tokens = sure;
  std::int64_t held = sure;
  auto held_expected = static_cast<double>(sure);
  double uncached = all - held_expected;
  double best_s = token_s * uncached;
  // Its own copies first: a load brings only what is beyond them.
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const PrefixCopy& copy = copies[i];
    if (copy.is_load) {
      continue;
    }
    const std::int64_t cached = std::min(copy.tokens, most);
    const double expected = static_cast<double>(cached) * probability(copy, moment);
    double wait_s = 0.0;
    if (copy.certainty == Certainty::kPredicted) {
      wait_s = std::max(0.0, copy.ready_at_s - moment.now_s - best.queue_s);
    } else if (expected > held_expected) {
      held = cached;
      held_expected = expected;
    }
    const double cost_s = wait_s + token_s * (all - expected);
    if (cost_s < best_s) {
      best_s = cost_s;
      uncached = all - expected;
      best.load_s = wait_s;
      best.copy = static_cast<int>(i);
      best.cached_tokens = cached;
    }
  }
  bool loads = false;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    const PrefixCopy& copy = copies[i];
    const std::int64_t cached = std::min(copy.tokens, most);
    if (!copy.is_load || cached <= held) {
      continue;
    }
    const double chance = probability(copy, moment);
    const auto moved = static_cast<double>(copy.queued_tokens) + static_cast<double>(cached - held);
    double load_s = chance * (copy.latency_s + moved / copy.load_tokens_s);
    if (copy.certainty == Certainty::kPredicted) {
      load_s += std::max(0.0, copy.ready_at_s - moment.now_s - best.queue_s);
    }
    const double left =
        all - (chance * static_cast<double>(cached) + (1.0 - chance) * held_expected);
    const double cost_s = load_s + token_s * left;
    if (cost_s < best_s) {
      best_s = cost_s;
      uncached = left;
      best.load_s = load_s;
      best.copy = static_cast<int>(i);
      best.cached_tokens = cached;
      loads = true;
    }
  }
  best.load_tokens = loads ? best.cached_tokens - held : 0;
  best.compute_s = uncached / engine.tokens_s;
  if (engine.kv_tokens > 0) {
    const double excess =
        static_cast<double>(engine.context_tokens) + all - static_cast<double>(engine.kv_tokens);
    best.preemption_s = std::max(0.0, excess) / engine.tokens_s;
  }
  return best;
}

}  // namespace kvstrata
