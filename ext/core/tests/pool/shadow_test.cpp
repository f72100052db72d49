#include "pool/shadow.h"

#include <algorithm>
#include <array>
#include <vector>

#include "support/check.h"
#include "support/pool_fixture.h"

using namespace kvstrata;
using namespace kvstrata::testing;

namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

std::vector<SampledChunk> prompt(std::uint64_t number, std::uint32_t chunks) {
  std::vector<SampledChunk> made;
  for (std::uint32_t depth = 0; depth < chunks; ++depth)
    made.push_back({number << 20 | depth, depth});
  return made;
}

}  // namespace

TEST(a_shadow_has_what_fits_and_leaves_from_the_end_of_the_oldest_prompt) {
  Shadow shadow(10, "LRU", 0.5, true);
  CHECK_EQ(shadow.request(prompt(1, 6), kSecond), 0);
  CHECK_EQ(shadow.request(prompt(2, 4), 2 * kSecond), 0);
  CHECK_EQ(shadow.request(prompt(1, 6), 3 * kSecond), 6);
  CHECK_EQ(shadow.request(prompt(3, 2), 4 * kSecond), 0);  // for the last two chunks of prompt 2
  CHECK_EQ(shadow.request(prompt(2, 2), 5 * kSecond), 2);
  CHECK_EQ(shadow.request(prompt(4, 20), 6 * kSecond), 0);
  CHECK_EQ(shadow.request(prompt(4, 20), 7 * kSecond), 10);
  CHECK_EQ(shadow.sums().chunks, 60.0);
  CHECK_EQ(shadow.sums().hit_chunks, 18.0);
  CHECK_EQ(shadow.sums().hit_cost, (6 + 7.5) + (2 + 0.5) + (10 + 22.5));
}

namespace {

std::uint64_t draw(std::uint64_t* random, std::uint64_t below) {
  *random = *random * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
  return (*random >> 33) % below;
}

bool is_near(double forecast, double actual) {
  return forecast > actual - 0.015 && forecast < actual + 0.015;
}

// Prompts of 4 chunks of which a tenant's next one is likely to be among its newest 40 or so: the
// more it may keep, the more hits. Returns the shares of hits by tenant.
std::array<double, 3> run(Fixture& f, std::uint32_t n_slices = 1) {
  std::uint64_t random = 1;
  std::array<std::uint64_t, 3> newest{}, hits{}, asked{};
  for (std::uint64_t number = 1; number < 8'000; ++number) {
    const auto tenant = static_cast<std::uint32_t>(draw(&random, 3) == 0 ? 2 : 1);
    const std::uint64_t back = std::min(newest[tenant]++, draw(&random, 20 + 20 * tenant));
    std::vector<Key> keys, all;
    for (std::uint32_t slice = 0; slice < n_slices; ++slice) {
      keys = chain((newest[tenant] - back) << 8 | tenant << 4 | slice, 4);
      for (std::size_t i = 0; i < keys.size(); ++i)
        all.insert(all.begin() + static_cast<std::ptrdiff_t>(i * (slice + 1) + slice), keys[i]);
    }
    f.pool->set_time(number * kSecond);
    const LeaseResult lease =
        f.lease(all, {0}, nullptr, std::vector<std::uint32_t>(n_slices), 0, tenant);
    if (lease.ticket != 0) f.pool->release(lease.ticket, -1);
    if (number >= 3'000) {
      hits[tenant] += lease.n_chunks;
      asked[tenant] += 4;
    }
    for (std::uint32_t slice = 0; slice < n_slices; ++slice) {
      keys.clear();
      for (std::size_t i = slice; i < all.size(); i += n_slices)
        keys.push_back(all[i]);
      f.store(keys, 0, kRecordBytes, tenant);
    }
    f.pool->learn();
  }
  const auto share = [&](std::size_t tenant) {
    return static_cast<double>(hits[tenant]) / static_cast<double>(asked[tenant]);
  };
  return {static_cast<double>(hits[1] + hits[2]) / static_cast<double>(asked[1] + asked[2]),
          share(1), share(2)};
}

}  // namespace

TEST(an_engine_that_stores_late_finds_here_what_its_own_cache_has_lost) {
  const auto prompt = [](std::uint64_t first, std::uint32_t n) {
    std::vector<SampledChunk> chunks;
    for (std::uint32_t depth = 0; depth < n; ++depth)
      chunks.push_back({first + depth, depth});
    return chunks;
  };
  const auto a = prompt(100, 4), b = prompt(200, 4), longer = prompt(100, 6);
  for (const bool late : {false, true}) {
    Shadow shadow(4, "LRU", 0, false, 4, late);
    std::uint64_t now = 0;
    const auto hits = [&](const std::vector<SampledChunk>& chunks) {
      return shadow.request(chunks, now += 1'000'000'000);
    };
    CHECK_EQ(hits(a), 0);
    CHECK_EQ(hits(a), 4);  // in the engine's cache
    CHECK_EQ(hits(b), 0);
    CHECK_EQ(hits(a), late ? 4 : 0);
    CHECK_EQ(hits(b), late ? 4 : 0);
    CHECK_EQ(hits(longer), late ? 4 : 0);
    // The engine has lost the end of the longer prompt, and that is stored behind its beginning.
    CHECK_EQ(hits(longer), 4);
  }
}

TEST(forecasts_are_those_of_pools_of_these_sizes_however_many_slices_a_chunk_has) {
  for (const std::uint32_t n_slices : {1u, 2u}) {
    Fixture once(128 * n_slices, "LRU", 512), twice(256 * n_slices, "LRU", 1'024);
    const double actual = run(once, n_slices)[0];
    const std::vector<Forecast> forecasts = once.pool->forecasts().sizes;
    CHECK_EQ(forecasts.size(), 4);
    CHECK_EQ(forecasts[2].factor, 2.0);
    CHECK(is_near(forecasts[1].hits, actual));
    CHECK(is_near(forecasts[2].hits, run(twice, n_slices)[0]));
    CHECK(forecasts[0].hits < forecasts[1].hits - 0.05);
    CHECK(forecasts[3].hits >= forecasts[2].hits);
  }
}

TEST(forecasts_by_tenant_are_those_of_quotas_of_these_sizes_without_what_is_beyond_them) {
  for (const std::uint32_t n_slices : {1u, 2u}) {
    std::vector<std::array<double, 3>> actual;
    std::vector<TenantForecast> told;
    for (const std::uint64_t factor : {2u, 1u}) {
      Fixture f(224 * factor * n_slices, "LRU", 2'048);
      for (const auto& [tenant, chunks] : {std::pair{1u, 64u}, std::pair{2u, 160u}})
        CHECK(f.pool->set_quota(tenant, chunks * factor * n_slices * std::int64_t{kRecordBytes}));
      actual.push_back(run(f, n_slices));
      told = f.pool->forecasts().tenants;
    }
    CHECK_EQ(told.size(), 2);
    for (const TenantForecast& one : told) {
      CHECK(!one.is_rest);
      CHECK_EQ(one.bytes, (one.tenant == 1 ? 64 : 160) * n_slices * kRecordBytes);
      CHECK(one.part > (one.tenant == 1 ? 0.6 : 0.3) && one.part < (one.tenant == 1 ? 0.7 : 0.4));
      CHECK_EQ(one.sizes.size(), one.tenant == 1 ? 0 : 4);  // 64 chunks tell too little
      if (one.tenant == 1) continue;
      CHECK(is_near(one.sizes[1].hits, actual[1][2]));
      CHECK(is_near(one.sizes[2].hits, actual[0][2]));
      CHECK(one.sizes[0].hits < one.sizes[1].hits - 0.05);
    }
  }
}

TEST(a_sample_of_a_tenants_chunks_tells_what_caches_of_these_sizes_would_hit) {
  constexpr double kRate = 0.25, kDepthCost = 0.1;
  TenantShare share;
  share.entries = 2'000;
  std::vector<Shadow> caches;
  for (const double factor : kFactors)
    caches.emplace_back(static_cast<std::size_t>(factor * 2'000), "LRU", kDepthCost, false);
  std::uint64_t random = 1;
  for (std::uint64_t number = 1; number < 20'000; ++number) {
    const std::uint64_t back = std::min(number, draw(&random, draw(&random, 2) == 0 ? 100 : 1'500));
    const std::vector<SampledChunk> chunks = prompt(number - back, 8);
    std::vector<SampledChunk> sampled;
    for (const SampledChunk& chunk : chunks) {
      std::uint64_t hash = chunk.tag;
      draw(&hash, 1);
      if (draw(&hash, 4) == 0) sampled.push_back(chunk);
    }
    share.expected.chunks += kRate * 8;
    share.expected.cost += kRate * (8 + kDepthCost * 28);
    share.request(sampled, kRate, kDepthCost);
    for (Shadow& cache : caches)
      cache.request(chunks, number * kSecond);
  }
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const Forecast told = share.forecast(kFactors[i], kRate);
    const ShadowSums& sums = caches[i].sums();
    CHECK(is_near(told.hits, sums.hit_chunks / sums.chunks));
    CHECK(is_near(told.seconds, sums.hit_cost / sums.cost));
  }
}

TEST(the_tenants_with_most_requests_have_forecasts_of_their_own) {
  Shadows shadows(0);
  shadows.run({}, 1'000, "LRU", false);
  for (std::uint64_t round = 0; round < 100; ++round) {
    for (std::uint32_t tenant = 1; tenant <= 60; ++tenant) {
      // At first the first ones are busy, then the last ones.
      const bool is_busy = round < 20 ? tenant <= 16 : tenant > 44;
      for (int times = is_busy ? 5 : 1; times > 0; --times)
        shadows.add(prompt(tenant, 4), {round * kSecond, 4, 1, tenant});
    }
    shadows.run(shadows.take(), 1'000, "LRU", false);
  }
  std::vector<std::uint32_t> own;
  for (const TenantForecast& one : shadows.forecasts().tenants)
    if (!one.is_rest) own.push_back(one.tenant);
  std::sort(own.begin(), own.end());
  CHECK_EQ(own.size(), Shadows::kTenants);
  CHECK_EQ(own.front(), 45);
  CHECK(shadows.forecasts().tenants.back().is_rest);
}
