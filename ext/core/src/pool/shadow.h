// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
//
// Shadows: estimate the hits of pools of other sizes. A shadow is a cache without bytes that the
// pool's own policy manages. It gets a sample of the chunks of every request, chosen by a hash of
// their keys, and its capacity is scaled by the same factor (SHARDS, Waldspurger et al., FAST
// 2015). Without sampling it replays the requests exactly.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pool/value.h"

namespace kvstrata {

// A chunk of a prompt: the first word of its key, and the number of chunks before it.
struct SampledChunk {
  std::uint64_t tag;
  std::uint32_t depth;
};

// A request in a log, or a hint, which has a `next` other than 0: 16 bytes, then the tags of its
// chunks, 8 bytes each (docs/internals/formats.md).
struct LoggedRequest {
  std::uint64_t monotonic_ns;
  std::uint32_t n_chunks;
  Hint hint;
  std::uint16_t zero = 0;
};
static_assert(sizeof(LoggedRequest) == 16);

// The requests since the last call of take(), if it was started. Thread-safe; its mutex is a leaf.
class RequestLog {
 public:
  static constexpr std::size_t kMaxBytes = 64 << 20;  // further requests are dropped

  // `salt`: a random number that is mixed into tags, so that the log does not reveal keys.
  void start(std::uint64_t salt) noexcept { salt_.store(salt | 1, std::memory_order_relaxed); }
  void add(const std::uint8_t* keys, std::size_t n_chunks, std::size_t stride,
           std::uint64_t monotonic_ns, Hint hint = {});
  std::string take();

 private:
  std::atomic<std::uint64_t> salt_{0};  // 0: not started
  std::mutex mutex_;
  std::string bytes_;
};

// Chunks, and their costs in units of a prompt's first chunk.
struct ShadowSums {
  double chunks = 0;
  double hit_chunks = 0;
  double cost = 0;
  double hit_cost = 0;

  void fade(double factor) noexcept;
};

// A model of an engine's own cache of `capacity` chunks: it evicts the least recently used
// chunks, those of one prompt from the last one on.
class EngineCache {
 public:
  explicit EngineCache(std::size_t capacity) : capacity_(capacity) {}

  bool has_room() const noexcept { return capacity_ != 0; }
  // How many leading chunks of a prompt it has.
  std::size_t leading(std::span<const SampledChunk> chunks) const;
  // A prompt was computed.
  void use(std::span<const SampledChunk> chunks);
  // Whether it has more than fits, so that the oldest chunk is lost.
  bool is_over() const noexcept { return held_.size() > capacity_; }
  // The oldest chunk and those before it in its prompt, up to the first of which `ends(tag)`,
  // from that one on. REQUIRES: it has a chunk.
  template <typename Ends>
  std::vector<SampledChunk> oldest(Ends ends) const {
    std::vector<SampledChunk> chain;
    for (auto held = std::prev(held_.end());;) {
      chain.push_back(held->chunk);
      const auto parent = places_.find(held->parent);
      if (ends(held->chunk.tag) || parent == places_.end() || held->chunk.depth == 0) break;
      held = parent->second;
    }
    std::reverse(chain.begin(), chain.end());
    return chain;
  }
  void drop_oldest() noexcept {
    places_.erase(held_.back().chunk.tag);
    held_.pop_back();
  }

 private:
  struct Held {
    SampledChunk chunk;
    std::uint64_t parent;  // its tag; of the first chunk its own
  };

  const std::size_t capacity_;
  std::list<Held> held_;  // the newest first
  std::unordered_map<std::uint64_t, std::list<Held>::iterator> places_;
};

// Not thread-safe.
class Shadow {
 public:
  // `capacity`: chunks. `policy`, `depth_cost`: see Value. `refuses`: see kWorthLess. With
  // `engine_chunks` an engine with a cache of that size asks, which counts as a hit, too; with
  // `late` chunks come here when that cache loses them, and its hits are no uses of chunks here.
  Shadow(std::size_t capacity, std::string_view policy, double depth_cost, bool refuses,
         std::size_t engine_chunks = 0, bool late = false);

  // A lookup of a prompt, and the store of the missing chunks. Returns the hits among `chunks`,
  // and adds to the sums. Learns from time to time.
  std::size_t request(std::span<const SampledChunk> chunks, std::uint64_t monotonic_ns);
  // A hint about the next request that will use these chunks.
  void hint(std::span<const SampledChunk> chunks, std::uint64_t monotonic_ns, Hint hint);
  // All requests of a log. False, having seen those before it, if one is incomplete.
  [[nodiscard]] bool replay(std::string_view log);
  const ShadowSums& sums() const noexcept { return sums_; }
  void fade(double factor) noexcept { sums_.fade(factor); }

 private:
  double cost(std::size_t depth) const noexcept {
    return 1 + depth_cost_ * static_cast<double>(depth);
  }
  // Counts a request with `hits` hits.
  void count(std::span<const SampledChunk> chunks, std::size_t hits);
  // Touches the leading chunks after the first `own` that are present, and stores the others if
  // `stores`. Returns the number of leading chunks that were present.
  std::size_t use(std::span<const SampledChunk> chunks, std::size_t own, bool stores);
  // An entry for a new chunk; kNoEntry if no entry may be evicted for it.
  std::uint32_t make_room(float worth);
  void learn();

  std::vector<EntryLocal> locals_;
  std::vector<std::uint64_t> tags_;     // by entry
  std::vector<std::uint32_t> parents_;  // likewise
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::uint64_t, std::uint32_t> entry_of_;
  Value policy_;
  Learner learner_;
  const double depth_cost_;
  const bool refuses_;
  ShadowSums sums_;
  std::vector<std::uint32_t> path_;  // scratch of use()
  EngineCache engine_;
  const bool late_;
};

// Of the pool's size, or of a tenant's share of it.
inline constexpr std::array<double, 4> kFactors = {0.5, 1, 2, 4};

// The hits that recent requests would have had at a size, as shares of chunks and of seconds.
struct Forecast {
  double factor;
  double hits;
  double seconds;
};

// A tenant's share of the pool, and the hits of its requests with a share of any other size. A
// share keeps the most recently used chunks: those at the end of a stack (Mattson et al., IBM
// Systems Journal 1970), whose depths give the hits for all sizes at once.
struct TenantShare {
  std::uint32_t tenant = 0;
  std::uint64_t bytes = 0;    // in the pool now
  std::uint64_t entries = 0;  // likewise
  double requests = 0;        // of late
  std::size_t n_slices = 1;
  std::vector<std::uint64_t> stack;  // tags of sampled chunks, a chunk before its ancestors
  ShadowSums expected;               // see Shadows
  ShadowSums asked;
  std::array<ShadowSums, 128> found;  // by depth in the stack, eighths of octaves

  // `rate`: the share of chunks that is sampled.
  double sampled(double rate) const noexcept {
    return rate * static_cast<double>(entries) / static_cast<double>(n_slices);
  }
  void request(std::span<const SampledChunk> chunks, double rate, double depth_cost);
  Forecast forecast(double factor, double rate) const noexcept;
};

// The shares of the tenants with the most requests; the last one is of all others together.
struct TenantForecast {
  std::uint32_t tenant;
  bool is_rest;
  std::uint64_t bytes;
  double part;  // of the seconds that the requests of all tenants would take without a cache
  std::vector<Forecast> sizes;  // empty if the sample has too little of this share
};

struct Forecasts {
  std::vector<Forecast> sizes;  // of the pool; empty as long as nothing is known
  std::vector<TenantForecast> tenants;
};

// A pool's shadows. The pool queues its requests; run() passes them to the shadows, on a thread
// that may block.
class Shadows {
 public:
  static constexpr std::size_t kChunks = 512;          // of the shadow of factor 1
  static constexpr std::size_t kTenantChunks = 8192;   // of the shares of all tenants together
  static constexpr std::size_t kTenants = 16;          // besides the others
  static constexpr std::size_t kMaxWaiting = 1 << 18;  // chunks; further ones are dropped

  explicit Shadows(double depth_cost) noexcept : depth_cost_(depth_cost) {}

  // The sampled ones of a prompt's keys, of which each `stride`-th counts, starting with the first.
  // Any thread.
  std::vector<SampledChunk> sample(const std::uint8_t* keys, std::size_t n_chunks,
                                   std::size_t stride) const;
  struct Waiting {
    // A tenant's request, or a hint.
    struct Request {
      std::uint64_t monotonic_ns;
      std::size_t n_chunks = 0;
      std::size_t n_slices = 1;
      std::uint32_t tenant = 0;
      Hint hint{};
      std::size_t end = 0;  // of its sampled chunks among `chunks`, set by add()
    };
    std::vector<SampledChunk> chunks;
    std::vector<Request> requests;
    std::size_t n_slices = 1;  // of the last request
  };
  // REQUIRES, for both: the pool's mutex. take() gives all that was added.
  void add(const std::vector<SampledChunk>& sampled, Waiting::Request request);
  Waiting take() noexcept;
  // For the caller to fill in before run(): `bytes` and `entries` of each.
  std::vector<TenantShare>& shares() noexcept { return shares_; }
  // `capacity`: entries that the pool has room for, as far as it is known now; the first call with
  // a positive one decides, and `policy` and `refuses` with it. One thread at a time.
  void run(const Waiting& waiting, std::size_t capacity, std::string_view policy, bool refuses);
  Forecasts forecasts() const;

 private:
  // The share of a tenant that makes a request: its own, which it gets by making twice as many
  // requests as the least busy tenant with a share, or that of the others.
  TenantShare& share_of(std::uint32_t tenant);

  const double depth_cost_;
  // A chunk is sampled if its hash is below this, 2^32 being all; 0 until the capacity is known.
  std::atomic<std::uint64_t> below_{0};
  std::uint64_t shadows_below_ = 0;  // the same for the shadows, which see fewer
  Waiting waiting_;
  std::vector<Shadow> shadows_;  // by factor
  ShadowSums expected_;          // the sums of a perfectly proportional sample
  std::vector<TenantShare> shares_;
  std::unordered_map<std::uint32_t, double> requests_;  // recent ones, of tenants without a share
};

}  // namespace kvstrata
