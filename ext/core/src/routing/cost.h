// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// What a request costs at one engine: the formula of the routing policy `ttft`, which
// policy/routing/ttft.py explains. Seconds are of one monotonic clock, tokens of the prompt.
//
// Pure functions: they read nothing but their arguments, so equal arguments give equal costs.
#pragma once

#include <cstdint>
#include <span>

namespace kvstrata {

// What a router knows of an engine's queue and cache; see EngineState in policy/routing/model.py.
struct EngineLoad {
  double tokens_s = 1.0;  // above 0
  double backlog_tokens = 0.0;
  double at_s = 0.0;
  double moved_s = 0.0;
  std::int64_t behind_tokens = 0;
  std::int64_t prefill_tokens = 0;
  std::int64_t context_tokens = 0;
  std::int64_t kv_tokens = 0;  // 0: unknown
  bool may_be_late = false;    // requests wait, and `moved_s` is known
};

enum class Certainty : std::uint8_t { kExact, kDegraded, kPredicted, kUnconfirmed };

// A prefix that the engine can have, in its own cache or by a load.
struct PrefixCopy {
  std::int64_t tokens = 0;
  double age_s = 0.0;
  double ready_at_s = 0.0;
  // Of a load: latency, rate (above 0), and tokens of the loads before it.
  double latency_s = 0.0;
  double load_tokens_s = 1.0;
  std::int64_t queued_tokens = 0;
  Certainty certainty = Certainty::kExact;
  bool is_load = false;
};

// What all engines of a decision have in common.
struct Moment {
  std::int64_t tokens = 1;  // of the prompt; at least 1
  double now_s = 0.0;
  double block_life_s = 1.0;  // above 0
  double event_lag_s = 0.0;
};

struct Estimate {
  double queue_s = 0.0;
  double load_s = 0.0;
  double compute_s = 0.0;
  double preemption_s = 0.0;
  int copy = -1;  // its place among the copies; -1: what the engine holds for certain
  std::int64_t cached_tokens = 0;
  std::int64_t load_tokens = 0;

  [[nodiscard]] double cost_s() const noexcept {
    return queue_s + load_s + compute_s + preemption_s;
  }
};

// Seconds until the engine has computed what was sent to it before. An engine that should have
// computed all of it, and has not, is expected to need as long again as it is late.
[[nodiscard]] double queue_s(const EngineLoad& engine, double now_s) noexcept;

// The cheapest way at one engine. `held_tokens`: the prefix that its own cache has for certain.
[[nodiscard]] Estimate estimate(const Moment& moment, const EngineLoad& engine,
                                std::int64_t held_tokens,
                                std::span<const PrefixCopy> copies) noexcept;

}  // namespace kvstrata
