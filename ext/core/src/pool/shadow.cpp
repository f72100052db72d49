// Copyright the kvstrata authors. SPDX-License-Identifier: Apache-2.0
#include "pool/shadow.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <unordered_set>
#include <utility>

namespace kvstrata {

namespace {

constexpr double kFade = 0.9999;  // a request: figures are those of the last 10,000 or so

// Not the bits of the tag that choose the chunk's place in tables.
std::uint64_t hash_of(std::uint64_t tag) noexcept {
  return (tag * 0x9E37'79B9'7F4A'7C15u) >> 32;
}

Forecast forecast_of(double factor, const ShadowSums& sums, const ShadowSums& expected) noexcept {
  // What a sample has too little or too much of are hot chunks, that is, hits.
  const auto share = [](double hit, double all, double of) {
    return std::clamp((hit + of - all) / of, 0.0, 1.0);
  };
  return {factor, share(sums.hit_chunks, sums.chunks, expected.chunks),
          share(sums.hit_cost, sums.cost, expected.cost)};
}

}  // namespace

std::size_t EngineCache::leading(std::span<const SampledChunk> chunks) const {
  std::size_t n = 0;
  while (n < chunks.size() && places_.contains(chunks[n].tag))
    ++n;
  return n;
}

void EngineCache::use(std::span<const SampledChunk> chunks) {
  for (std::size_t i = chunks.size(); i-- > 0;) {
    if (const auto place = places_.find(chunks[i].tag); place != places_.end()) {
      held_.splice(held_.begin(), held_, place->second);
    } else {
      held_.push_front({chunks[i], chunks[i == 0 ? 0 : i - 1].tag});
      places_.emplace(chunks[i].tag, held_.begin());
    }
  }
}

Shadow::Shadow(std::size_t capacity, std::string_view policy, double depth_cost, bool refuses,
               std::size_t engine_chunks, bool late)
    : locals_(capacity),
      tags_(capacity),
      parents_(capacity, kNoEntry),
      policy_(policy, depth_cost, locals_.data(), capacity),
      depth_cost_(depth_cost),
      refuses_(refuses),
      engine_(engine_chunks),
      late_(late) {
  entry_of_.reserve(capacity);
  for (std::size_t entry = capacity; entry-- > 0;)
    free_.push_back(static_cast<std::uint32_t>(entry));
}

std::size_t Shadow::request(std::span<const SampledChunk> chunks, std::uint64_t monotonic_ns) {
  policy_.tell_time(monotonic_ns);
  policy_.count_request();
  const std::size_t own = engine_.leading(chunks);
  const std::size_t hits = std::max(own, use(chunks, late_ ? own : 0, !late_));
  count(chunks, hits);
  if (engine_.has_room()) engine_.use(chunks);
  std::unordered_set<std::uint64_t> tried;
  for (; engine_.is_over(); engine_.drop_oldest()) {
    if (!late_) continue;
    const auto ends = [&](std::uint64_t tag) {
      return entry_of_.contains(tag) || !tried.insert(tag).second;
    };
    const std::vector<SampledChunk> lost = engine_.oldest(ends);
    // A chunk whose beginning is neither here nor in the engine's cache is of no use.
    if (lost.front().depth == 0 || entry_of_.contains(lost.front().tag))
      use(lost, lost.size(), true);
  }
  learn();
  return hits;
}

void Shadow::count(std::span<const SampledChunk> chunks, std::size_t hits) {
  sums_.chunks += static_cast<double>(chunks.size());
  sums_.hit_chunks += static_cast<double>(hits);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    sums_.cost += cost(chunks[i].depth);
    if (i < hits) sums_.hit_cost += cost(chunks[i].depth);
  }
}

std::size_t Shadow::use(std::span<const SampledChunk> chunks, std::size_t own, bool stores) {
  path_.clear();
  for (const SampledChunk& chunk : chunks) {
    const auto found = entry_of_.find(chunk.tag);
    if (found == entry_of_.end()) break;
    path_.push_back(found->second);
  }
  const std::size_t hits = path_.size();
  for (std::size_t i = hits; i-- > 0;) {
    locals_[path_[i]].leases = 1;
    if (i >= own) policy_.touch(path_[i]);
  }
  if (!stores) chunks = chunks.first(hits);
  float worth = std::numeric_limits<float>::infinity();
  if (refuses_ && free_.empty()) {
    worth = 0;
    for (const SampledChunk& chunk : chunks.subspan(hits)) {
      const Traits traits = policy_.traits_of_new(chunk.tag, chunk.depth);
      worth = std::max(worth, policy_.worth_of_new(traits));
    }
  }
  for (std::size_t i = hits; i < chunks.size(); ++i) {
    const std::uint32_t entry = make_room(worth);
    if (entry == kNoEntry) {
      for (const SampledChunk& chunk : chunks.subspan(i))
        policy_.refused(chunk.tag);
      break;
    }
    EntryLocal& local = locals_[entry];
    local = EntryLocal{};
    local.traits = policy_.traits_of_new(chunks[i].tag, chunks[i].depth);
    local.used_at = policy_.now();
    local.leases = 1;
    tags_[entry] = chunks[i].tag;
    entry_of_[chunks[i].tag] = entry;
    parents_[entry] = path_.empty() ? kNoEntry : path_.back();
    if (!path_.empty() && ++locals_[path_.back()].children == 2) policy_.branch(path_.back());
    path_.push_back(entry);
  }
  for (std::size_t i = path_.size(); i-- > 0;) {
    locals_[path_[i]].leases = 0;
    if (i < hits) {
      policy_.unblocked(path_[i], i >= own);
    } else {
      policy_.insert(path_[i]);
    }
  }
  return hits;
}

void Shadow::hint(std::span<const SampledChunk> chunks, std::uint64_t monotonic_ns, Hint hint) {
  policy_.tell_time(monotonic_ns);
  for (std::size_t i = chunks.size(); i-- > 0;) {
    const auto found = entry_of_.find(chunks[i].tag);
    if (found != entry_of_.end()) policy_.hint(found->second, hint);
  }
}

std::uint32_t Shadow::make_room(float worth) {
  if (free_.empty()) {
    const std::uint32_t victim = policy_.victim(0);
    if (victim == kNoEntry || policy_.worth(victim) > worth) return kNoEntry;
    policy_.remove(victim, tags_[victim], true);
    entry_of_.erase(tags_[victim]);
    const std::uint32_t parent = parents_[victim];
    if (parent != kNoEntry && --locals_[parent].children == 0 && locals_[parent].is_victim())
      policy_.unblocked(parent, false);
    free_.push_back(victim);
  }
  const std::uint32_t entry = free_.back();
  free_.pop_back();
  return entry;
}

bool Shadow::replay(std::string_view log) {
  std::vector<SampledChunk> chunks;
  while (!log.empty()) {
    LoggedRequest request;
    if (log.size() < sizeof request) return false;
    std::memcpy(&request, log.data(), sizeof request);
    log.remove_prefix(sizeof request);
    if (log.size() / sizeof(std::uint64_t) < request.n_chunks) return false;
    chunks.resize(request.n_chunks);
    for (std::uint32_t depth = 0; depth < request.n_chunks; ++depth) {
      std::memcpy(&chunks[depth].tag, log.data() + depth * sizeof(std::uint64_t),
                  sizeof(std::uint64_t));
      chunks[depth].depth = depth;
    }
    log.remove_prefix(request.n_chunks * sizeof(std::uint64_t));
    if (request.hint.next != 0) {
      hint(chunks, request.monotonic_ns, request.hint);
    } else {
      this->request(chunks, request.monotonic_ns);
    }
  }
  return true;
}

void Shadow::learn() {
  constexpr int kSamples = 2048;
  Lesson lesson;
  if (!policy_.begin_lesson(&lesson)) return;
  const auto n_entries = static_cast<std::uint32_t>(locals_.size());
  policy_.sample(&lesson, kSamples, n_entries, static_cast<float>(n_entries) / kSamples);
  policy_.teach(learner_.learn(lesson));
}

void ShadowSums::fade(double factor) noexcept {
  for (double* sum : {&chunks, &hit_chunks, &cost, &hit_cost})
    *sum *= factor;
}

void TenantShare::request(std::span<const SampledChunk> chunks, double rate, double depth_cost) {
  auto at = stack.end();
  bool is_hit = true;
  for (const SampledChunk& chunk : chunks) {
    const double cost = 1 + depth_cost * chunk.depth;
    asked.chunks += 1;
    asked.cost += cost;
    if (!is_hit) continue;
    // It lies right before its parent, unless another prompt has used the parent since.
    auto next = at;
    while (next != stack.begin() && *(next - 1) != chunk.tag)
      --next;
    is_hit = next != stack.begin();
    if (!is_hit) continue;
    at = next - 1;
    const auto depth = static_cast<std::uint64_t>(stack.end() - at);
    const auto octave = static_cast<std::size_t>(std::bit_width(depth)) - 1;
    ShadowSums& bin = found[std::min(found.size() - 1, octave * 8 + (depth * 8 >> octave) % 8)];
    bin.hit_chunks += 1;
    bin.hit_cost += cost;
    *at = 0;
  }
  stack.erase(std::remove(at, stack.end(), 0), stack.end());
  for (std::size_t i = chunks.size(); i-- > 0;)
    stack.push_back(chunks[i].tag);
  const double most = kFactors.back() * sampled(rate);
  const auto limit = std::max(Shadows::kTenantChunks, static_cast<std::size_t>(most));
  if (stack.size() > limit)
    stack.erase(stack.begin(), stack.end() - static_cast<std::ptrdiff_t>(limit));
}

Forecast TenantShare::forecast(double factor, double rate) const noexcept {
  ShadowSums sums = asked;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double width = std::exp2(i / 8) / 8;
    const double first = width * static_cast<double>(8 + i % 8);
    const double part = std::clamp((factor * sampled(rate) + 1 - first) / width, 0.0, 1.0);
    sums.hit_chunks += part * found[i].hit_chunks;
    sums.hit_cost += part * found[i].hit_cost;
  }
  return forecast_of(factor, sums, expected);
}

void RequestLog::add(const std::uint8_t* keys, std::size_t n_chunks, std::size_t stride,
                     std::uint64_t monotonic_ns, Hint hint) {
  const std::uint64_t salt = salt_.load(std::memory_order_relaxed);
  if (salt == 0 || n_chunks == 0) return;
  const std::lock_guard lock(mutex_);
  const std::size_t begin = bytes_.size();
  const std::size_t length = sizeof(LoggedRequest) + n_chunks * sizeof(std::uint64_t);
  if (begin + length > kMaxBytes) return;
  bytes_.resize(begin + length);
  const LoggedRequest request{monotonic_ns, static_cast<std::uint32_t>(n_chunks), hint};
  std::memcpy(bytes_.data() + begin, &request, sizeof request);
  char* out = bytes_.data() + begin + sizeof request;
  for (std::size_t chunk = 0; chunk < n_chunks; ++chunk, out += sizeof(std::uint64_t)) {
    std::uint64_t tag;
    std::memcpy(&tag, keys + chunk * stride * kKeyBytes, sizeof tag);
    tag = (tag ^ salt) * 0xBF58'476D'1CE4'E5B9u;  // the mixer of splitmix64 by S. Vigna
    tag = (tag ^ tag >> 27) * 0x94D0'49BB'1331'11EBu;
    tag ^= tag >> 31;
    std::memcpy(out, &tag, sizeof tag);
  }
}

std::string RequestLog::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(bytes_, {});
}

std::vector<SampledChunk> Shadows::sample(const std::uint8_t* keys, std::size_t n_chunks,
                                          std::size_t stride) const {
  const std::uint64_t below = below_.load(std::memory_order_relaxed);
  std::vector<SampledChunk> sampled;
  for (std::size_t chunk = 0; chunk < n_chunks && below != 0; ++chunk) {
    std::uint64_t tag;
    std::memcpy(&tag, keys + chunk * stride * kKeyBytes, sizeof tag);
    if (hash_of(tag) < below) sampled.push_back({tag, static_cast<std::uint32_t>(chunk)});
  }
  return sampled;
}

void Shadows::add(const std::vector<SampledChunk>& sampled, Waiting::Request request) {
  if (request.hint.next == 0) waiting_.n_slices = request.n_slices;
  if (below_.load(std::memory_order_relaxed) == 0 ||
      waiting_.chunks.size() + sampled.size() > kMaxWaiting ||
      waiting_.requests.size() >= kMaxWaiting) {
    return;
  }
  waiting_.chunks.insert(waiting_.chunks.end(), sampled.begin(), sampled.end());
  request.end = waiting_.chunks.size();
  waiting_.requests.push_back(request);
}

Shadows::Waiting Shadows::take() noexcept {
  Waiting taken = std::exchange(waiting_, {});
  waiting_.n_slices = taken.n_slices;
  return taken;
}

TenantShare& Shadows::share_of(std::uint32_t tenant) {
  const auto others = shares_.end() - 1;
  auto share = std::find_if(shares_.begin(), others,
                            [&](const TenantShare& one) { return one.tenant == tenant; });
  if (share == others) {
    const double n = requests_[tenant] += 1;
    if (shares_.size() <= kTenants) {
      share = shares_.emplace(others);
    } else {
      share = std::min_element(shares_.begin(), others, [](const auto& one, const auto& other) {
        return one.requests < other.requests;
      });
      if (n < 2 * share->requests) return *others;
    }
    requests_.erase(tenant);
    *share = TenantShare{};
    share->tenant = tenant;
    share->requests = n;
  }
  share->requests += 1;
  return *share;
}

void Shadows::run(const Waiting& waiting, std::size_t capacity, std::string_view policy,
                  bool refuses) {
  if (shadows_.empty()) {
    if (capacity == 0) return;
    const double chunks = static_cast<double>(capacity) / static_cast<double>(waiting.n_slices);
    const double rate = std::min(1.0, static_cast<double>(kChunks) / chunks);
    shadows_.reserve(kFactors.size());
    for (const double factor : kFactors) {
      const double room = std::max(1.0, factor * rate * chunks);
      shadows_.emplace_back(static_cast<std::size_t>(room), policy, depth_cost_, refuses);
    }
    shares_.emplace_back();
    shadows_below_ = static_cast<std::uint64_t>(rate * 0x1p32);
    const double more = std::min(1.0, static_cast<double>(kTenantChunks) / chunks);
    below_.store(static_cast<std::uint64_t>(more * 0x1p32), std::memory_order_relaxed);
    return;
  }
  const double rate = static_cast<double>(below_.load(std::memory_order_relaxed)) / 0x1p32;
  const double shadows_rate = static_cast<double>(shadows_below_) / 0x1p32;
  std::vector<SampledChunk> few;
  std::size_t begin = 0;
  for (const Waiting::Request& request : waiting.requests) {
    const auto sampled = std::span(waiting.chunks).subspan(begin, request.end - begin);
    begin = request.end;
    few.clear();
    std::copy_if(sampled.begin(), sampled.end(), std::back_inserter(few),
                 [&](const SampledChunk& chunk) { return hash_of(chunk.tag) < shadows_below_; });
    if (request.hint.next != 0) {
      for (Shadow& shadow : shadows_)
        shadow.hint(few, request.monotonic_ns, request.hint);
      continue;
    }
    const auto n = static_cast<double>(request.n_chunks);
    const double cost = n + depth_cost_ * n * (n - 1) / 2;
    expected_.chunks += shadows_rate * n;
    expected_.cost += shadows_rate * cost;
    for (Shadow& shadow : shadows_)
      shadow.request(few, request.monotonic_ns);
    TenantShare& share = share_of(request.tenant);
    share.n_slices = request.n_slices;
    share.expected.chunks += rate * n;
    share.expected.cost += rate * cost;
    share.request(sampled, rate, depth_cost_);
  }
  const double fade = std::pow(kFade, static_cast<double>(waiting.requests.size()));
  expected_.fade(fade);
  for (Shadow& shadow : shadows_)
    shadow.fade(fade);
  for (TenantShare& share : shares_) {
    share.requests *= fade;
    share.expected.fade(fade);
    share.asked.fade(fade);
    for (ShadowSums& sums : share.found)
      sums.fade(fade);
  }
  for (auto& [tenant, n] : requests_)
    n *= fade;
  std::erase_if(requests_, [](const auto& one) { return one.second < 0.5; });
}

Forecasts Shadows::forecasts() const {
  constexpr double kLeastChunks = 128;  // sampled ones in a share of which anything is told
  Forecasts found;
  for (std::size_t i = 0; i < shadows_.size() && expected_.chunks > 0; ++i)
    found.sizes.push_back(forecast_of(kFactors[i], shadows_[i].sums(), expected_));
  const double rate = static_cast<double>(below_.load(std::memory_order_relaxed)) / 0x1p32;
  double cost = 0;
  for (const TenantShare& share : shares_)
    cost += share.expected.cost;
  for (const TenantShare& share : shares_) {
    if (share.expected.chunks <= 0) continue;
    TenantForecast one{
        share.tenant, &share == &shares_.back(), share.bytes, share.expected.cost / cost, {}};
    for (std::size_t i = 0; i < kFactors.size() && share.sampled(rate) >= kLeastChunks; ++i)
      one.sizes.push_back(share.forecast(kFactors[i], rate));
    found.tenants.push_back(std::move(one));
  }
  return found;
}

}  // namespace kvstrata
